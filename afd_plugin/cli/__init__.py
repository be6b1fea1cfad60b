# SPDX-License-Identifier: Apache-2.0
"""The command line `afd`. The launching process imports neither vLLM nor torch; its children do."""
