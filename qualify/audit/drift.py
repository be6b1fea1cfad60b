# SPDX-License-Identifier: Apache-2.0
"""The registry against the installed sources: every signature and every digest is what was recorded."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from afd_plugin.seams.schema import Registry, Seam, Surface
from qualify.audit import normalise
from qualify.audit.symbols import Symbol
from qualify.audit.upstream import Upstream
from qualify.lint.findings import Finding

SHORT = 16
"""Digits of a digest that a surface records per name."""
_REGISTRY = "afd_plugin/seams"


def check(registry: Registry, upstream: Upstream) -> Iterator[Finding]:
    """A finding for every symbol that is gone or not what the registry says."""
    for entry in registry:
        if isinstance(entry, Seam):
            yield from _check_seam(entry, upstream)
        else:
            yield from _check_surface(entry, upstream)


def seam_record(symbol: Symbol, upstream: Upstream) -> tuple[str, str] | None:
    """The signature and full digest of a symbol as they are now; None when it is not defined."""
    nodes = upstream.definition(symbol)
    if not nodes:
        return None
    return ("" if not symbol.qualname else normalise.signature(nodes)), normalise.digest(nodes)


def surface_record(symbol: Symbol, upstream: Upstream) -> str | None:
    """The short digest of a symbol that is only used as it stands; None when it is not defined."""
    nodes = upstream.definition(symbol)
    if not nodes and upstream.module(f"{symbol.module}.{symbol.qualname}") is not None:
        return "module"
    shapes: Sequence[ast.AST] = [normalise.header(n) if isinstance(n, ast.ClassDef) else n for n in nodes]
    return normalise.digest(shapes)[:SHORT] if shapes else None


def _check_seam(seam: Seam, upstream: Upstream) -> Iterator[Finding]:
    now = seam_record(Symbol.parse(seam.symbol), upstream)
    if now is None:
        yield _drift(seam, f"{seam.symbol} is not defined in the installed sources")
        return
    signature, digest = now
    if signature != seam.signature:
        yield _drift(
            seam, f"the signature of {seam.symbol} is now `{signature}`, recorded is `{seam.signature}`"
        )
    if digest != seam.sha256:
        yield _drift(seam, f"the source of {seam.symbol} is not the one this project was written against")


def _check_surface(surface: Surface, upstream: Upstream) -> Iterator[Finding]:
    owner = Symbol.parse(surface.owner)
    for name, recorded in surface.names.items():
        now = surface_record(owner.member(name), upstream)
        if now is None:
            yield _drift(surface, f"{owner.member(name)} is not defined in the installed sources")
        elif now != recorded:
            yield _drift(
                surface, f"the definition of {owner.member(name)} changed (now {now}, recorded {recorded})"
            )


def _drift(entry: Seam | Surface, seen: str) -> Finding:
    return Finding(
        _REGISTRY,
        1,
        "drift",
        f"{entry.id}: {seen}. Read the change against the invariant ({entry.invariant}), mend our side, then record "
        f"what `python -m qualify.audit --record {entry.id}` prints.",
    )
