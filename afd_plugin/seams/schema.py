# SPDX-License-Identifier: Apache-2.0
"""What the registry says about one use of vLLM (or of a private part of torch). Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class SeamKind(str, Enum):
    """What we do at a seam."""

    SUBCLASS = "subclass"
    """A class of ours derives from the symbol; the digest covers the whole class body."""
    OVERRIDE = "override"
    """A class of ours defines the symbol again; the native caller now reaches our code."""
    CALL = "call"
    """We call it and rely on more than its signature."""
    ATTRIBUTE = "attribute"
    """We read it and rely on when it is set, or on what it means."""
    STATE_WRITE = "state-write"
    """We assign this attribute of one vLLM object that this process owns; never of a class or a module."""
    CONFIG_MUTATION = "config-mutation"
    """We assign this attribute of a configuration object before vLLM reads it."""
    REGISTRY_SCOPE = "registry-scope"
    """We change this vLLM registry, by its own functions where it has them, for a bounded scope."""
    HOOK = "hook"
    """We register a callback by a function made for that."""
    ENTRY_POINT = "entry-point"
    """vLLM finds us, or is started by us, under this name."""


@dataclass(frozen=True)
class Seam:
    """One upstream symbol whose behaviour this project changes or builds on.

    Attributes:
        id: the name by which findings, tests and documents refer to it.
        symbol: ``module:qualname`` of the definition (not of a re-export); a bare ``module:`` for a module.
        kind: what we do there.
        signature: header of the definition as `python -m qualify.audit --record ID` prints it.
        sha256: digest of the definition's normalised source (comments, docstrings and layout do not count).
        invariant: what must stay true upstream for our use to be right.
        plan: how the seam goes away, or what to propose upstream.
        used_by: modules of ours that use it.
        afd_tests: tests that exercise the seam in an AFD run, as pytest node ids.
        native_tests: tests that show that a process without AFD is not affected, as pytest node ids.
    """

    id: str
    symbol: str
    kind: SeamKind
    signature: str
    sha256: str
    invariant: str
    plan: str
    used_by: tuple[str, ...]
    afd_tests: tuple[str, ...]
    native_tests: tuple[str, ...]


@dataclass(frozen=True)
class Surface:
    """Names of one upstream module or class that we import, read or call as they stand.

    Attributes:
        id: the name by which findings refer to it.
        owner: ``module:`` for names of a module, ``module:Class`` for attributes defined by that class.
        names: each name with the first 16 digits of the digest of its definition: a function's whole source, the
            assignments to an attribute, or a class's header (bases, decorators) only.
        invariant: what we rely on, for all the names together.
        plan: how our use goes away, or what to propose upstream.
        afd_tests: tests that exercise these names, as pytest node ids.
    """

    id: str
    owner: str
    names: Mapping[str, str]
    invariant: str
    afd_tests: tuple[str, ...]
    plan: str = "none needed: read as it stands"


@dataclass(frozen=True)
class Registry:
    """Every seam and surface of the project."""

    seams: tuple[Seam, ...]
    surfaces: tuple[Surface, ...] = field(default=())

    def __iter__(self) -> Iterator[Seam | Surface]:
        yield from self.seams
        yield from self.surfaces

    def find(self, id: str) -> Seam | Surface:  # noqa: A002 - the registry's own word
        """The entry called ``id``; raises KeyError."""
        for entry in self:
            if entry.id == id:
                return entry
        raise KeyError(id)
