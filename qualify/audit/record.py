# SPDX-License-Identifier: Apache-2.0
"""Prints what an entry should hold now, for a maintainer to read and put into the registry by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from afd_plugin.seams.schema import Registry, Seam, SeamKind
from qualify.audit.drift import seam_record, surface_record
from qualify.audit.symbols import How, Symbol, Use
from qualify.audit.upstream import Upstream

_KINDS = {
    How.SUBCLASS: SeamKind.SUBCLASS,
    How.OVERRIDE: SeamKind.OVERRIDE,
    How.WRITE: SeamKind.STATE_WRITE,
    How.MUTATE: SeamKind.REGISTRY_SCOPE,
}


def record(registry: Registry, id_: str, upstream: Upstream) -> str:
    """The fields of entry `id_` that are computed from upstream; raises KeyError for an unknown id."""
    entry = registry.find(id_)
    if isinstance(entry, Seam):
        return "\n".join(_seam_fields(Symbol.parse(entry.symbol), upstream))
    owner = Symbol.parse(entry.owner)
    return "\n".join(_names(owner, sorted(entry.names), upstream))


def propose(uncovered: Iterable[Use], upstream: Upstream) -> Iterator[str]:
    """Skeletons for uses that no entry covers: invariant, plan and tests are the maintainer's to write."""
    plain: dict[Symbol, set[str]] = {}
    for symbol, kind in sorted({(u.symbol, _KINDS.get(u.how)) for u in uncovered}, key=str):
        if kind is None:
            plain.setdefault(symbol.owner, set()).add(symbol.name)
            continue
        users = sorted({u.path for u in uncovered if u.symbol == symbol})
        yield f"Seam(\n    symbol={str(symbol)!r},\n    kind=SeamKind.{kind.name},"
        yield from (f"    {line}" for line in _seam_fields(symbol, upstream))
        yield f"    # used in {', '.join(users)}\n)"
    for owner, names in sorted(plain.items()):
        yield f"Surface(\n    owner={str(owner)!r},"
        yield from (f"    {line}" for line in _names(owner, sorted(names), upstream))
        yield ")"


def _seam_fields(symbol: Symbol, upstream: Upstream) -> Iterator[str]:
    found = seam_record(symbol, upstream)
    if found is None:
        yield f"# {symbol} is not defined in the installed sources"
        return
    signature, digest = found
    yield f"signature={signature!r},"
    yield f"sha256={digest!r},"


def _names(owner: Symbol, names: Iterable[str], upstream: Upstream) -> Iterator[str]:
    yield "names={"
    for name in names:
        found = surface_record(owner.member(name), upstream)
        yield (
            f"    {name!r}: {found!r}," if found else f"    # {name} is not defined in the installed sources"
        )
    yield "},"
