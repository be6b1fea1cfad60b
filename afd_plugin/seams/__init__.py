# SPDX-License-Identifier: Apache-2.0
"""Every place where this project touches vLLM's internals, as data: the registry that `nox -s audit` checks."""

from __future__ import annotations

from afd_plugin.seams.schema import Registry, Seam, SeamKind, Surface

REGISTRY = Registry(seams=(), surfaces=())

__all__ = ["REGISTRY", "Registry", "Seam", "SeamKind", "Surface"]
