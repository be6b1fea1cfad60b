# SPDX-License-Identifier: Apache-2.0
"""The uses that the checks found against the registry: each use has an entry, each entry has a use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from afd_plugin.seams.schema import Registry, Seam, SeamKind, Surface
from qualify.audit.symbols import How, Symbol, Use
from qualify.lint.findings import Finding

# what an entry must say it does for a use to be covered by it; other uses are covered by any entry
_DEMANDS: dict[How, frozenset[SeamKind]] = {
    How.SUBCLASS: frozenset({SeamKind.SUBCLASS}),
    How.OVERRIDE: frozenset({SeamKind.OVERRIDE}),
    How.WRITE: frozenset({SeamKind.STATE_WRITE, SeamKind.CONFIG_MUTATION}),
    How.MUTATE: frozenset({SeamKind.REGISTRY_SCOPE}),
}


class Coverage:
    """Matches uses with entries and remembers which entries were used, and where."""

    def __init__(self, registry: Registry) -> None:
        self._seams: dict[Symbol, list[Seam]] = {}
        self._surfaces: dict[Symbol, Surface] = {}
        for seam in registry.seams:
            self._seams.setdefault(Symbol.parse(seam.symbol), []).append(seam)
        for surface in registry.surfaces:
            owner = Symbol.parse(surface.owner)
            self._surfaces |= {owner.member(name): surface for name in surface.names}
        self._registry = registry
        self.found: dict[str, set[Use]] = {entry.id: set() for entry in registry}
        self._used_names: set[Symbol] = set()
        self.uncovered: set[Use] = set()

    @property
    def named(self) -> Set[Symbol]:
        """Every symbol that an entry names."""
        return self._seams.keys() | self._surfaces.keys()

    def take(self, uses: Iterable[Use]) -> None:
        """Match `uses`; what no entry covers is in `uncovered`."""
        for use in uses:
            if not self._cover(use) and use.required:
                self.uncovered.add(use)

    def _cover(self, use: Use) -> bool:
        demanded = _DEMANDS.get(use.how)
        seams = self._seams.get(use.symbol, ())
        fitting = [s for s in seams if demanded is None or s.kind in demanded]
        for seam in fitting:
            self.found[seam.id].add(use)
        surface = self._surfaces.get(use.symbol)
        if surface is not None:
            self.found[surface.id].add(use)
            self._used_names.add(use.symbol)
        if demanded is None and not use.symbol.qualname:
            return self._module_covered(use)
        return bool(fitting) or (surface is not None and demanded is None)

    def _module_covered(self, use: Use) -> bool:
        """Importing a module is covered by any entry on something in it; that is then what is used."""
        owners = {
            Symbol.parse(entry.symbol if isinstance(entry, Seam) else entry.owner) for entry in self._registry
        }
        return bool(self._seams.get(use.symbol)) or any(o.module == use.symbol.module for o in owners)

    def findings(self) -> Iterator[Finding]:
        """Uses without an entry, entries (and names) without a use, entries whose `used_by` is wrong."""
        for use in sorted(self.uncovered):
            yield Finding(use.path, use.line, "unregistered", _unregistered(use))
        for entry in self._registry:
            found = self.found[entry.id]
            if isinstance(entry, Seam) and entry.kind is SeamKind.ENTRY_POINT and not found:
                continue  # vLLM finds us there: no line of ours shows it
            if not found:
                yield _stale(entry, "nothing uses it any more: remove the entry")
            elif isinstance(entry, Seam):
                users = {
                    use.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for use in found
                }
                if users != set(entry.used_by):
                    yield _stale(
                        entry, f"used_by says {sorted(entry.used_by)}, the users are {sorted(users)}"
                    )
            else:
                owner = Symbol.parse(entry.owner)
                for name in entry.names:
                    if owner.member(name) not in self._used_names:
                        yield _stale(entry, f"nothing uses {owner.member(name)} any more: remove the name")


def _unregistered(use: Use) -> str:
    wanted = {
        How.SUBCLASS: "a Seam of kind subclass",
        How.OVERRIDE: "a Seam of kind override",
        How.WRITE: "a Seam of kind state-write or config-mutation",
        How.MUTATE: "a Seam of kind registry-scope",
    }.get(use.how, "a name in a Surface, or a Seam")
    return f"{use.how.value} {use.symbol}, which afd_plugin/seams does not name: use less of vLLM, or add {wanted}"


def _stale(entry: Seam | Surface, seen: str) -> Finding:
    return Finding("afd_plugin/seams", 1, "stale", f"{entry.id}: {seen}")
