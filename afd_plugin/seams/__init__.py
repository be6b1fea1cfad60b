# SPDX-License-Identifier: Apache-2.0
"""Every place where this project touches vLLM's internals, as data: the registry `nox -s audit` checks.

`schema` says what an entry holds. Signatures and digests come from `python -m qualify.audit --record ID` and are put
here by hand, after the upstream change was read against the entry's invariant.
"""

from __future__ import annotations

from afd_plugin.seams import (
    config,
    connectors,
    layers,
    loading,
    moe_runner,
    service,
    shards,
    steps,
    tracing,
    worker,
    worker_calls,
)
from afd_plugin.seams.schema import Registry, Seam, SeamKind, Surface

_AREAS = (
    moe_runner,
    layers,
    loading,
    worker,
    worker_calls,
    steps,
    config,
    connectors,
    service,
    shards,
    tracing,
)

REGISTRY = Registry(
    seams=tuple(seam for area in _AREAS for seam in area.SEAMS),
    surfaces=tuple(surface for area in _AREAS for surface in area.SURFACES),
)

__all__ = ["REGISTRY", "Registry", "Seam", "SeamKind", "Surface"]
