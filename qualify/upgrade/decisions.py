# SPDX-License-Identifier: Apache-2.0
"""Recorded decisions: the only thing that resolves a conflict of identities or an architectural finding.

A decision is a TOML file under `docs/upgrades/decisions/`. It binds to exactly what was seen when it was taken: an
identity decision to the conflicting values, an architecture decision to the findings it names.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from qualify.upgrade import toml

FOLDER = Path("docs/upgrades/decisions")


class DecisionKind(str, Enum):
    """What was decided about."""

    IDENTITY = "identity"
    ARCHITECTURE = "architecture"
    ALIGNMENT = "alignment"


@dataclass(frozen=True)
class Decision:
    """One record.

    Attributes:
        name: the file's name without its suffix.
        kind: identity, architecture or alignment.
        date: the day it was taken.
        subject: the conflict's subject, or `CURRENT to TARGET` for the other two kinds.
        chosen: the value or course taken.
        reason: why.
        consequences: what follows, and what must not be claimed.
        decided_by: who answers for it.
        values: for an identity, every value that was seen.
        covers: for an architecture, the ids of the findings it answers.
    """

    name: str
    kind: DecisionKind
    date: datetime.date
    subject: str
    chosen: str
    reason: str
    consequences: str
    decided_by: str
    values: frozenset[str] = frozenset()
    covers: frozenset[str] = frozenset()


_REQUIRED = {"kind", "date", "subject", "chosen", "reason", "consequences", "decided_by"}


def read(path: Path) -> Decision:
    """One decision; raises toml.RecordError when it is incomplete."""
    raw = toml.fields(toml.read(path), _REQUIRED, {"values", "covers"}, path.name)
    try:
        kind = DecisionKind(raw["kind"])
    except ValueError as error:
        raise toml.RecordError(f"{path.name}: {error}") from error
    if not isinstance(raw["date"], datetime.date):
        raise toml.RecordError(f"{path.name}: date is no date: {raw['date']!r}")
    if any(not str(raw[name]).strip() for name in _REQUIRED):
        raise toml.RecordError(f"{path.name}: an empty field decides nothing")
    wanted = {DecisionKind.IDENTITY: "values", DecisionKind.ARCHITECTURE: "covers"}.get(kind)
    if wanted and not raw.get(wanted):
        raise toml.RecordError(f"{path.name}: a decision about {kind.value} names its `{wanted}`")
    raw |= {
        "kind": kind,
        "values": frozenset(raw.get("values", ())),
        "covers": frozenset(raw.get("covers", ())),
    }
    return Decision(name=path.stem, **raw)


def load(folder: Path) -> tuple[Decision, ...]:
    """All decisions in a folder, by name; none when the folder does not exist."""
    return tuple(read(path) for path in sorted(folder.glob("*.toml")))


def for_identity(decisions: Iterable[Decision], subject: str, values: frozenset[str]) -> Decision | None:
    """The decision about exactly these conflicting values."""
    for decision in decisions:
        if (
            decision.kind is DecisionKind.IDENTITY
            and decision.subject == subject
            and decision.values == values
        ):
            return decision
    return None


def covering(decisions: Iterable[Decision], subject: str, finding: str) -> Decision | None:
    """The architecture decision of this upgrade that answers a finding."""
    for decision in decisions:
        if (
            decision.kind is DecisionKind.ARCHITECTURE
            and decision.subject == subject
            and finding in decision.covers
        ):
            return decision
    return None
