# SPDX-License-Identifier: Apache-2.0
"""What depends on vLLM and how: this project's registered seams, and what the 0.26 plugin touched (data)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from afd_plugin.seams.schema import Registry, Seam, SeamKind
from qualify.audit.symbols import Symbol
from qualify.upgrade import toml

TOUCHED = Path(__file__).with_name("touched-0.26.toml")


class Use(str, Enum):
    """How a symbol is depended on; what can break follows from it."""

    COPY = "copy"
    """An edited copy of the body replaces the function."""
    WRAP = "wrap"
    """A function that calls the original replaces it."""
    OVERRIDE = "override"
    """A subclass defines it again and calls the native one, or replaces it for one object."""
    RECOPY = "recopy"
    """A subclass defines it again with an edited copy of the body."""
    SUBCLASS = "subclass"
    SWAP = "swap"
    """Another object stands under the name that native code looks up."""
    STUB = "stub"
    """An object of another class stands in for one of this class."""
    WRITE = "write"
    """The attribute is assigned from outside."""
    CALL = "call"
    READ = "read"


class Disposition(str, Enum):
    """What is done about a seam; a judgement, recorded, never computed from a score."""

    REMOVE = "remove"
    DELEGATE = "delegate"
    PORT = "port"
    PROPOSE = "propose"
    STOP = "stop"


OF_SEAM = {
    SeamKind.SUBCLASS: Use.SUBCLASS,
    SeamKind.OVERRIDE: Use.OVERRIDE,
    SeamKind.CALL: Use.CALL,
    SeamKind.ATTRIBUTE: Use.READ,
    SeamKind.STATE_WRITE: Use.WRITE,
    SeamKind.CONFIG_MUTATION: Use.WRITE,
    SeamKind.REGISTRY_SCOPE: Use.WRITE,
    SeamKind.HOOK: Use.CALL,
    SeamKind.ENTRY_POINT: Use.READ,
}


@dataclass(frozen=True)
class Dependency:
    """One use of one symbol.

    Attributes:
        id: the seam, surface or table entry it belongs to.
        symbol: as it is imported (not necessarily where it is defined).
        use: how.
        invariant: what is relied on, or what it was used for.
        disposition: what is done about it, where that has been decided.
        now: how the need is met without it.
        lane: `gpu`, `npu` (out of this project's scope) or `all`.
        positional: whether an override hands its arguments on by position.
        held_as: for a stub, the attribute under which native code holds it.
        holder: for a stub, the class that holds it.
        tests: test node ids that would notice.
        used_by: modules of ours that use it, where the registry names them.
    """

    id: str
    symbol: Symbol
    use: Use
    invariant: str = ""
    disposition: Disposition | None = None
    now: str = ""
    lane: str = "all"
    positional: bool = False
    held_as: str = ""
    holder: str = ""
    tests: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()


_REQUIRED = {"id", "symbols", "use", "purpose", "disposition", "now"}
_OPTIONAL = {"lane", "forwards", "held_as", "holder"}


def touched(path: Path = TOUCHED) -> tuple[Dependency, ...]:
    """The table of what an earlier implementation used; raises toml.RecordError when it is malformed."""
    found: list[Dependency] = []
    for number, raw in enumerate(toml.read(path).get("touch", ()), start=1):
        entry = toml.fields(raw, _REQUIRED, _OPTIONAL, f"{path.name}, entry {number}")
        try:
            use, disposition = Use(entry["use"]), Disposition(entry["disposition"])
        except ValueError as error:
            raise toml.RecordError(f"{path.name}, entry {entry['id']}: {error}") from error
        found += [
            Dependency(
                id=entry["id"],
                symbol=Symbol.parse(symbol),
                use=use,
                invariant=entry["purpose"],
                disposition=disposition,
                now=entry["now"],
                lane=entry.get("lane", "gpu"),
                positional=entry.get("forwards") == "positional",
                held_as=entry.get("held_as", ""),
                holder=entry.get("holder", ""),
            )
            for symbol in entry["symbols"]
        ]
    return tuple(found)


def seams(registry: Registry) -> tuple[Dependency, ...]:
    """Every registered seam and every name of every surface."""
    found: list[Dependency] = []
    for entry in registry:
        if isinstance(entry, Seam):
            use, tests = OF_SEAM[entry.kind], (*entry.afd_tests, *entry.native_tests)
            symbol = Symbol.parse(entry.symbol)
            found.append(
                Dependency(
                    entry.id, symbol, use, entry.invariant, now=entry.plan, tests=tests, used_by=entry.used_by
                )
            )
            continue
        owner = Symbol.parse(entry.owner)
        use = Use.READ if owner.qualname else Use.CALL
        found += [
            Dependency(
                entry.id, owner.member(name), use, entry.invariant, now=entry.plan, tests=entry.afd_tests
            )
            for name in sorted(entry.names)
        ]
    return tuple(found)
