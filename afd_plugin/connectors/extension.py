# SPDX-License-Identifier: Apache-2.0
"""What the package loses without its CUDA extension `afd_plugin._C`, which is built apart from the wheel.

Imports no torch, so that the launcher can refuse before it starts anything.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from afd_plugin.errors import ConfigRefused

EXTENSION = "afd_plugin._C"
NEEDED_BY = "CudaIpcAFDConnector"
LOST = (
    f"The extension {EXTENSION} is not built here, so {NEEDED_BY} is lost, and with it several roles on one GPU; "
    "everything else works. Run `python -m qualify.csrc build` in a checkout with nvcc 13.0, or give each role a GPU "
    "of its own and choose --connector P2pNcclAFDConnector."
)


def is_built() -> bool:
    """Whether the extension lies beside the package; loading it may still fail."""
    return find_spec(EXTENSION) is not None


def check_connector(name: str) -> None:
    """Raise ``ConfigRefused`` for a connector that needs the extension where it was not built."""
    if name == NEEDED_BY and not is_built():
        raise ConfigRefused(LOST)


def load() -> None:
    """Load it, which registers its operators; ``ConfigRefused`` where it is missing or does not fit this torch."""
    check_connector(NEEDED_BY)
    try:
        import_module(EXTENSION)
    except ImportError as error:
        raise ConfigRefused(
            f"The extension {EXTENSION} cannot be loaded ({error}); build it again here."
        ) from error
