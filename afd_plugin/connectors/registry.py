# SPDX-License-Identifier: Apache-2.0
"""Connectors by name. Modules are imported on first use, so a CPU host never imports a CUDA binding."""

from __future__ import annotations

from importlib import import_module

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import AFDConnector, ConnectorShape
from afd_plugin.errors import ConfigRefused

_MODULES = {
    "TcpAFDConnector": "afd_plugin.connectors.tcp",
    "GlooAFDConnector": "afd_plugin.connectors.gloo",
    "CudaIpcAFDConnector": "afd_plugin.connectors.cuda_ipc",
    "P2pNcclAFDConnector": "afd_plugin.connectors.p2p_nccl",
}


def connector_class(name: str) -> type[AFDConnector]:
    """The connector class called ``name``; raises ``ConfigRefused`` for a name or a build that lacks it."""
    try:
        module = import_module(_MODULES[name])
    except KeyError:
        raise ConfigRefused(f"Unknown connector {name!r}; known are {', '.join(_MODULES)}.") from None
    except ModuleNotFoundError as missing:
        raise ConfigRefused(
            f"{name} cannot be used here: the module {missing.name!r} is not installed."
        ) from missing
    found: object = vars(module)[name]
    if not isinstance(found, type) or not issubclass(found, AFDConnector):
        raise TypeError(f"{found} is not an AFDConnector")
    return found


def create_connector(name: str, shape: ConnectorShape, settings: LinkSettings) -> AFDConnector:
    """Construct the connector ``name``; allocates its arenas, opens nothing yet."""
    return connector_class(name)(shape, settings)
