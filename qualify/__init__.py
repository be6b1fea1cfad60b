# SPDX-License-Identifier: Apache-2.0
"""The build-and-validate toolchain: the logic behind `noxfile.py`. Not shipped in the wheel.

Each module answers one question and can be run by itself: `environment` (what runs where), `locks` (what is
pinned), `lint` (rules no linter knows), `package` (what is shipped), `audit` (which parts of vLLM are used).
"""
