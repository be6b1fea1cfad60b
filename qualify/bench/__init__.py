# SPDX-License-Identifier: Apache-2.0
"""Measurements of AFD against native vLLM, side by side in one run: `nox -s bench -- cpu`."""
