# SPDX-License-Identifier: Apache-2.0
"""One go on a GPU host: what is checked and measured there, as `python -m qualify.gpu PART... --out FOLDER`.

GPU time is scarce, so every part runs as many engines side by side as the host has cores for, all parts share
one MPS daemon, and each part writes its evidence as soon as it has it.
"""
