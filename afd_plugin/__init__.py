# SPDX-License-Identifier: Apache-2.0
"""Attention-FFN Disaggregation for vLLM 0.28.0, as an external plugin.

Importing this package imports neither torch nor vLLM, changes no environment variable, no start method and no
registry. vLLM's loader of general plugins swallows exceptions and hands :func:`register` no configuration, so the
plugin does nothing there: the AFD workers are selected by their class path (``--worker-cls``) and every process that
runs one proves by its HELLO that AFD is live.
"""

from __future__ import annotations

__version__ = "0.28.0"
VLLM_VERSION = "0.28.0"


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; idempotent and free of side effects by design.

    It exists so that an installed plugin is visible to vLLM's own listing and to ``afd check``. Out-of-tree layers and
    loaders are registered only inside the worker of a role, while its model is built (``afd_plugin.model``), so a
    process without an AFD worker stays a native vLLM process.
    """
