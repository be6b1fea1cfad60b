# SPDX-License-Identifier: Apache-2.0
"""A chain's records as the workflow's phases: `python -m qualify phases`, and the end of every gate.

The phases before implementation come from the planning audit's report, the others from the ledger; the state machine
of `qualify.phases` takes them in order and refuses what breaks it. A phase of several sessions is PASS when the last
record of each of them is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from qualify import ledger, verify
from qualify.cells import Cell
from qualify.chain import GPU_FREE, Part, Profile, gpu_free, parts
from qualify.identity import Binding
from qualify.ledger import Entry, Record
from qualify.phases import ORDER, Mode, Phase, PhaseError, PhaseRecord, Status, Workflow, report

PLAN = Path("docs") / "upgrades" / "0.26.0-to-0.28.0.md"
"""The planning audit that this release was made by."""

PLANNED = ORDER[ORDER.index(Phase.INVENTORY_AFD_CONTRACTS) : ORDER.index(Phase.IMPLEMENT_ATOMIC_ADAPTATIONS)]


def planned(path: Path) -> tuple[PhaseRecord, ...]:
    """The planning audit's own phases, from the table of its report; PhaseError when one is not there."""
    text = path.read_text(encoding="utf-8")
    cells = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if "|" in line
    ]
    rows = {row[0]: row for row in cells if len(row) == 5}
    source = f"{path.name} sha256 {hashlib.sha256(text.encode()).hexdigest()}"
    found = []
    for phase in PLANNED:
        if phase.value not in rows:
            raise PhaseError(f"{path.name} has no row of {phase.value}: it is no report of a planning audit")
        _, status, _, blocker, action = rows[phase.value]
        found.append(PhaseRecord(phase, Status(status), (source,), blocker.strip("-"), action))
    return tuple(found)


def of_phase(phase: Phase, chain: Sequence[Part], entries: Sequence[Entry]) -> PhaseRecord | None:
    """One phase from the last record of each of its sessions; None while one that could run has none."""
    last = {entry.key: entry for entry in entries}
    mine = [last.get(part.key) for part in chain if part.phase is phase]
    bad = next((entry for entry in mine if entry is not None and entry.status is not Status.PASS), None)
    if bad is not None:
        return PhaseRecord(
            phase, bad.status, bad.evidence, f"{bad.title}: {bad.blocker}", bad.next_allowed_action
        )
    passed = [entry for entry in mine if entry is not None]
    if len(passed) < len(mine) or not passed:
        return None
    evidence = tuple(f"{entry.title} log {entry.logs.get('log', '-')}" for entry in passed)
    return PhaseRecord(phase, Status.PASS, evidence, "", passed[-1].next_allowed_action)


def left_elsewhere(cell: Cell, phase: Phase) -> bool:
    """Whether the whole of a phase is left to the chain of another cell."""
    return any(part.phase is phase for part in gpu_free(cell))


def of_another_cell(
    cell: Cell, phase: Phase, profile: Profile, binding: Binding, directory: Path
) -> PhaseRecord | None:
    """A phase that the chain of `GPU_FREE` holds at the same revision; None while it lacks anything there."""
    if verify.lacking_elsewhere(cell, binding.revision, profile, directory):
        return None
    source = (f"chain of the cell {GPU_FREE}, revision {binding.revision}",)
    return PhaseRecord(phase, Status.PASS, source, "", "go on")


def workflow(
    cell: Cell,
    profile: Profile,
    binding: Binding,
    records: Sequence[Record],
    plan: Path,
    directory: Path = ledger.DIRECTORY,
) -> Workflow:
    """Final validation as far as it has come: each phase on record in order, up to the first that is not complete.

    `directory` has the ledgers of other cells. Raises PhaseError when the records break the order.
    """
    mine = [record.entry for record in records if record.entry.binding == binding]
    opened = [entry for entry in mine if not entry.session and entry.profile == profile.value]
    state = Workflow(Mode.FINAL_VALIDATION)
    if not opened:
        return state
    first = opened[-1]
    state = state.after(
        PhaseRecord(first.phase, first.status, first.evidence, first.blocker, first.next_allowed_action)
    )
    before = {record.phase: record for record in planned(plan)}
    chain, entries = parts(cell, profile), verify.of(records, binding, profile)
    if profile is Profile.QUALIFYING:  # last, because it stands
        entries += verify.standing(records, binding.revision)
    while state.stopped_by is None and (phase := state.next_phase) is not None:
        if phase in before:
            record: PhaseRecord | None = before[phase]
        elif not state.in_scope(phase):
            record = PhaseRecord(phase, Status.SKIPPED, (), f"not part of {state.mode.value}", "validate")
        elif left_elsewhere(cell, phase):
            record = of_another_cell(cell, phase, profile, binding, directory)
        else:
            record = of_phase(phase, chain, entries)
        if record is None:
            break
        state = state.after(record)
    return state.finished() if state.stopped_by is not None else state


def shown(cell: Cell, profile: Profile, state: Workflow) -> str:
    """The phases of a chain in the workflow's form; of a landing chain with the word that it proves nothing."""
    kind = "diagnostic" if profile is Profile.LANDING else "evidence"
    return f"cell: {cell.name}\nprofile: {profile.value} ({kind})\n{report(state)}"
