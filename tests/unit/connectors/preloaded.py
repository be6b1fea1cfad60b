# SPDX-License-Identifier: Apache-2.0
"""What the fork server imports once for all teams; importing it is all there is to it."""

import os

import vllm.config  # noqa: F401  (vLLM imports it, and with it most of itself, when a process group is made)

import afd_plugin.connectors.gloo
import afd_plugin.connectors.tcp  # noqa: F401
import tests.unit.connectors.scenarios  # noqa: F401

if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
    from vllm.platforms import current_platform  # noqa: F401  (resolved here, where it touches no device)
