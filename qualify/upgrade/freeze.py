# SPDX-License-Identifier: Apache-2.0
"""FREEZE_IDENTITY: who the two vLLM trees and this checkout are, and whether all that is said about them agrees."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qualify.process import CommandError, capture
from qualify.upgrade import decisions, toml
from qualify.upgrade.decisions import Decision
from qualify.upgrade.trees import UNKNOWN, Identity

_SHORTEST = 7
_FULL = 40


@dataclass(frozen=True)
class Statement:
    """What a document says about a vLLM release."""

    version: str
    commit: str
    source: str


@dataclass(frozen=True)
class Task:
    """The data of one upgrade: what documents state, and the base revision of this project.

    `base` is the full commit of the revision before the upgrade, or `none` with the reason.
    """

    statements: tuple[Statement, ...]
    base: str
    base_reason: str


@dataclass(frozen=True)
class Checkout:
    """This project as it lies there. `dirty` counts paths that differ from HEAD."""

    head: str
    branch: str
    dirty: int
    version: str
    python: str


@dataclass(frozen=True)
class Conflict:
    """Two sources that disagree. `values` maps each value to who says so."""

    subject: str
    values: Mapping[str, str]
    decision: Decision | None = None

    def __str__(self) -> str:
        said = "; ".join(f"{value} ({who})" for value, who in self.values.items())
        return f"{self.subject}: {said}"


@dataclass(frozen=True)
class Frozen:
    """The identity phase's result. It holds only when `blockers` is empty."""

    current: Identity
    target: Identity
    checkout: Checkout
    task: Task
    conflicts: tuple[Conflict, ...]
    blockers: tuple[str, ...]


def read_task(path: Path) -> Task:
    """The upgrade's data file; raises toml.RecordError when it is malformed."""
    raw = toml.fields(toml.read(path), {"base"}, {"stated"}, path.name)
    base = toml.fields(raw["base"], {"revision", "reason"}, set(), f"{path.name}, base")
    keys = {"version", "commit", "source"}
    stated = [toml.fields(entry, keys, set(), f"{path.name}, stated") for entry in raw.get("stated", ())]
    return Task(tuple(Statement(**entry) for entry in stated), base["revision"], base["reason"])


def checkout(root: Path) -> Checkout:
    """Read this project's revision from git; UNKNOWN where git does not answer."""
    version = toml.read(root / "pyproject.toml")["project"]["version"]
    try:
        head = capture(["git", "rev-parse", "HEAD"], cwd=root).stdout.strip()
        branch = capture(["git", "rev-parse", "--abbrev-ref", "HEAD"], cwd=root).stdout.strip()
        changed = capture(["git", "status", "--porcelain", "-z"], cwd=root).stdout
    except CommandError:
        return Checkout(UNKNOWN, UNKNOWN, 0, version, platform.python_version())
    return Checkout(
        head, branch, len([c for c in changed.split("\0") if c]), version, platform.python_version()
    )


def freeze(
    current: Identity, target: Identity, here: Checkout, task: Task, recorded: Iterable[Decision]
) -> Frozen:
    """Compare everything that is said; a disagreement without a recorded decision blocks, and so does UNKNOWN."""
    known = tuple(recorded)
    conflicts, blockers = [], []
    for role, identity in (("current", current), ("target", target)):
        for name, value in (
            ("version", identity.version),
            ("commit", identity.commit),
            ("digest", identity.sha256),
        ):
            if value == UNKNOWN:
                blockers.append(
                    f"the {name} of the {role} vLLM is UNKNOWN: {identity.name} does not state it"
                )
        conflict = _conflict(identity, task.statements)
        if conflict is None:
            continue
        decided = decisions.for_identity(known, conflict.subject, frozenset(conflict.values))
        conflicts.append(Conflict(conflict.subject, conflict.values, decided))
        if decided is None:
            blockers.append(f"{conflict}; no recorded decision names exactly these values")
    if here.version.split(".post")[0] != target.version:
        blockers.append(
            f"mirrored version policy: this project is {here.version}, so its target can only be vLLM "
            f"{here.version.split('.post')[0]}, not {target.version}"
        )
    if here.head == UNKNOWN:
        blockers.append("the revision of this checkout is UNKNOWN: git does not answer here")
    if current.sha256 == target.sha256:
        blockers.append("the current and the target tree are the same artifact")
    return Frozen(current, target, here, task, tuple(conflicts), tuple(blockers))


def _conflict(identity: Identity, statements: Iterable[Statement]) -> Conflict | None:
    stated = [s for s in statements if s.version == identity.version]
    values = {identity.commit: f"the {identity.source} {identity.name}"}
    for statement in stated:
        same = next((v for v in values if same_commit(v, statement.commit)), None)
        if same is None:
            values[statement.commit] = statement.source
    return Conflict(f"commit of vLLM {identity.version}", values) if len(values) > 1 else None


def full_commit(identity: Identity, statements: Iterable[Statement]) -> str:
    """The 40 digits where the tree or a statement that agrees with it gives them, with who said so; else UNKNOWN."""
    if len(identity.commit) == _FULL:
        return identity.commit
    for statement in statements:
        if len(statement.commit) == _FULL and same_commit(identity.commit, statement.commit):
            return f"{statement.commit} ({statement.source}; begins as the {identity.source} says)"
    return UNKNOWN


def same_commit(one: str, other: str) -> bool:
    """Whether two commit ids agree as far as the shorter goes, and the shorter is long enough to say anything."""
    shorter, longer = sorted((one, other), key=len)
    return len(shorter) >= _SHORTEST and longer.startswith(shorter)
