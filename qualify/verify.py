# SPDX-License-Identifier: Apache-2.0
"""Judge a ledger: is it what was written, is it of this revision and cell, and is the chain whole?

An edit, a removed record and a cut line show in the hashes. A cut tail and a ledger that was hashed anew as a
whole are consistent in themselves: they show against the head hash that a tag or an attestation carries, and
against the states of the file that git has. A record of another revision or cell shows in its binding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qualify import expected, ledger, sharding
from qualify.cells import ROOT, Cell, load
from qualify.chain import GPU_FREE, Part, Profile, gpu_free, parts
from qualify.identity import Binding
from qualify.ledger import Entry, LedgerError, Record
from qualify.phases import Status
from qualify.sharding import Cases


@dataclass(frozen=True)
class Verdict:
    """`faults` are signs that the ledger is not what was written; `missing` is what the chain still lacks."""

    head: str
    faults: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether the ledger is sound and the chain complete."""
        return not self.faults and not self.missing


def rewritten(content: bytes, states: Sequence[tuple[str, bytes]]) -> tuple[str, ...]:
    """Each committed state of the ledger that a later one, or `content`, does not continue."""
    said = []
    if not states:
        return ()
    for (commit, state), (later, after) in zip(states, [*states[1:], ("the file now", content)], strict=True):
        if not after.startswith(state):
            name = later if later == "the file now" else f"commit {later[:12]}"
            said.append(
                f"{name} does not continue the ledger of commit {commit[:12]}: it was rewritten or cut"
            )
    return tuple(said)


def up_to(records: Sequence[Record], head: str | None) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    """The records up to the attested head, and what is wrong when it is not among them."""
    if head is None:
        return tuple(records), ()
    for index, record in enumerate(records):
        if record.hash == head:
            return tuple(records[: index + 1]), ()
    return tuple(records), (
        f"no record has the attested head {head[:12]}: the tail was cut or all was hashed anew",
    )


def foreign(records: Sequence[Record], cell: str) -> tuple[str, ...]:
    """Each record that does not belong where it stands: of another cell, or of another binding than its chain."""
    said, opened = [], None
    for record in records:
        entry = record.entry
        if entry.cell != cell:
            said.append(f"record {record.sequence} is of the cell {entry.cell}, this ledger is of {cell}")
        if not entry.session:
            opened = entry.binding
        elif opened is None:
            said.append(f"record {record.sequence} ({entry.session}) belongs to no chain")
        elif entry.binding != opened:
            what = differing(entry.binding, opened)
            said.append(f"record {record.sequence} ({entry.session}) is foreign: {what} is not its chain's")
    return tuple(said)


def differing(one: Binding, other: Binding) -> str:
    """The names of the parts in which two bindings differ."""
    names = ("cell", "lock", "revision", "environment")
    pairs: Mapping[str, tuple[str, str]] = {
        "cell": (one.cell, other.cell),
        "lock": (one.lock, other.lock),
        "revision": (one.revision, other.revision),
        "environment": (one.environment, other.environment),
    }
    return ", ".join(name for name in names if pairs[name][0] != pairs[name][1])


def of(records: Sequence[Record], binding: Binding, profile: Profile) -> tuple[Entry, ...]:
    """The session entries of one binding and profile, in order."""
    return tuple(
        record.entry
        for record in records
        if record.entry.binding == binding and record.entry.profile == profile.value and record.entry.session
    )


def standing(records: Sequence[Record], revision: str) -> tuple[Entry, ...]:
    """The project's own failures in qualifying chains of a revision, in whatever environment: no later run makes one
    undone, nor does another environment or a head from before it.
    """
    return tuple(
        entry
        for entry in (record.entry for record in records)
        if entry.own_failure and (entry.profile, entry.revision) == (Profile.QUALIFYING.value, revision)
    )


def latest(
    records: Sequence[Record], cell: str, lock: str, revision: str, profile: Profile
) -> Binding | None:
    """What the last chain of this revision, lock and profile is bound to; None without one."""
    wanted = (lock, revision, profile.value)
    for entry in (record.entry for record in reversed(records)):
        if (entry.lock, entry.revision, entry.profile) == wanted:
            return Binding(cell, lock, revision, entry.environment)
    return None


def judged(entry: Entry, part: Part, cases: Cases) -> tuple[str, ...]:
    """Why a PASS does not count: a shorter list of cases, a case that did not pass, something left behind."""
    said = []
    if not entry.teardown.clean:
        said.append("left processes or files behind")
    if part.suite:
        wanted = sharding.of_shard(cases, part.shard)
        if entry.expected != expected.digest(wanted):
            said.append("ran another list of cases than this revision expects")
        number = sum(wanted.values())
        if entry.counts is None or {entry.counts.passed, entry.counts.collected} != {number}:
            said.append(f"did not pass all of {number} cases")
    return tuple(f"{part.title}: {reason}" for reason in said)


def lacking(
    entries: Sequence[Entry],
    chain: Sequence[Part],
    cases: Mapping[str, Cases],
    failures: Sequence[Entry] = (),
) -> tuple[str, ...]:
    """What a chain lacks to be complete: each part without a PASS that counts, each of the `failures` that stand."""
    said = [f"{entry.title} failed at this revision: it stands" for entry in failures]
    last: dict[tuple[str, str], Entry] = {}
    order: dict[tuple[str, str], int] = {}
    for index, entry in enumerate(entries):
        last[entry.key], order[entry.key] = entry, index
    session, before, latest = "", -1, -1
    for part in chain:
        if part.session != session:  # shards of one session run in any order
            session, before = part.session, latest
        entry_of_part = last.get(part.key)
        if entry_of_part is None:
            said.append(f"{part.title}: no record")
            continue
        if entry_of_part.status is not Status.PASS:
            said.append(f"{part.title}: {entry_of_part.status.value} ({entry_of_part.blocker})")
            continue
        if order[part.key] < before:
            said.append(f"{part.title}: ran before a session that precedes it")
        latest = max(latest, order[part.key])
        said += judged(entry_of_part, part, cases.get(part.suite, {}))
    if stray := sorted(set(last) - {part.key for part in chain}):
        said.append(f"records of sessions that the chain does not have: {stray}")
    return tuple(said)


def verify(
    cell: Cell,
    binding: Binding,
    profile: Profile,
    *,
    head: str | None = None,
    directory: Path = ledger.DIRECTORY,
    root: Path = ROOT,
) -> Verdict:
    """The verdict over a cell's ledger for one binding and profile."""
    path = ledger.path_of(cell.name, directory)
    content = path.read_bytes() if path.is_file() else b""
    try:
        records = ledger.decode(content, path.name)
    except LedgerError as error:
        return Verdict("", (str(error),), ())
    states = ledger.histories(path, root) if path.is_relative_to(root) else ()
    judged_records, faults = up_to(records, head)
    chain = parts(cell, profile)
    cases = {part.suite: expected.listed(part.suite, root) for part in chain if part.suite}
    mine = of(judged_records, binding, profile)
    failures = standing(records, binding.revision) if profile is Profile.QUALIFYING else ()
    return Verdict(
        judged_records[-1].hash if judged_records else ledger.GENESIS,
        (*faults, *rewritten(content, states), *foreign(records, cell.name)),
        (
            *lacking(mine, chain, cases, failures),
            *lacking_elsewhere(cell, binding.revision, profile, directory, root),
        ),
    )


def lacking_elsewhere(
    cell: Cell, revision: str, profile: Profile, directory: Path = ledger.DIRECTORY, root: Path = ROOT
) -> tuple[str, ...]:
    """What a GPU cell's chain leaves to the chain of another cell and that one lacks at the same revision.

    The last chain there of this revision and profile counts; for a landing chain a qualifying one does as well, which
    demands more. Raises LedgerError when its ledger is not sound.
    """
    chain = gpu_free(cell)
    if not chain:
        return ()
    other = load(GPU_FREE, root / "containers" / "cells.toml")
    lock, keys = other.lock_digest(root), {part.key for part in chain}
    records = ledger.read(other.name, directory)
    cases = {part.suite: expected.listed(part.suite, root) for part in chain if part.suite}
    found = []
    for accepted in (profile,) if profile is Profile.QUALIFYING else (profile, Profile.QUALIFYING):
        binding = latest(records, other.name, lock, revision, accepted)
        last = of(records, binding, accepted) if binding else ()
        failures = standing(records, revision) if accepted is Profile.QUALIFYING else ()
        mine, theirs = ([entry for entry in some if entry.key in keys] for some in (last, failures))
        found.append(lacking(mine, chain, cases, theirs))
    least = min(found, key=len)
    return tuple(f"on the cell {other.name}: {line}" for line in least)
