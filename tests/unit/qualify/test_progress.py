# SPDX-License-Identifier: Apache-2.0
"""A chain's records as the workflow's phases: what the ledger says is what the state machine allows, and no more."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from qualify import __main__ as command
from qualify import ledger, progress
from qualify.cells import ROOT, load
from qualify.chain import Part, Profile, parts
from qualify.identity import Binding
from qualify.ledger import Entry, Record
from qualify.phases import Phase, PhaseError, Status

CPU = load("cpu")
BINDING = Binding("cpu", "l" * 64, "r" * 64, "e" * 64)
PLAN = ROOT / progress.PLAN


def entry(part: Part, status: Status = Status.PASS, blocker: str = "none", profile: str = "landing") -> Entry:
    """One record of a chain."""
    return Entry(
        cell=BINDING.cell,
        lock=BINDING.lock,
        revision=BINDING.revision,
        environment=BINDING.environment,
        profile=profile,
        session=part.session,
        shard=part.shard,
        phase=part.phase,
        status=status,
        evidence=("`a command`",),
        blocker=blocker,
        next_allowed_action="go on",
        started="",
        seconds=1.0,
    )


OPENING = entry(Part("", Phase.FREEZE_IDENTITY))
CHAIN = parts(CPU, Profile.LANDING)


def chained(*entries: Entry) -> tuple[Record, ...]:
    """The entries as a ledger holds them."""
    records: list[Record] = []
    for one in entries:
        records.append(ledger.chained(one, records[-1] if records else None))
    return tuple(records)


def statuses(*entries: Entry, profile: Profile = Profile.LANDING) -> dict[str, str]:
    """Each phase's status after these records."""
    state = progress.workflow(CPU, profile, BINDING, chained(*entries), PLAN)
    return {record.phase.value: record.status.value for record in state.records}


def test_a_whole_chain_passes_every_phase_but_the_lessons_and_claims_no_more() -> None:
    """What came before implementation is the planning audit's, by its digest; writing the lessons is a person's."""
    records = chained(OPENING, *map(entry, CHAIN))
    state = progress.workflow(CPU, Profile.LANDING, BINDING, records, PLAN)
    found = {record.phase: record for record in state.records}
    assert {phase for phase, record in found.items() if record.status is not Status.PASS} == {
        Phase.IMPLEMENT_ATOMIC_ADAPTATIONS
    }
    assert found[Phase.DIFF_VLLM].evidence[0].startswith("0.26.0-to-0.28.0.md sha256 ")
    assert [line.split()[0] for line in found[Phase.STATIC_AND_UNIT_GATE].evidence] == [
        "lint", "typecheck", "unit", "package", "audit", "abi",
    ]  # fmt: skip
    assert state.readiness() == "incomplete: CAPTURE_LESSONS_AND_REPORT is next"
    said = progress.shown(CPU, Profile.LANDING, state)
    assert "profile: landing (diagnostic)" in said
    assert "phase: FINAL_AUDIT\nstatus: PASS" in said


def test_a_session_that_did_not_pass_stops_every_later_phase() -> None:
    """Its own words are the phase's blocker, whatever stands after it in the ledger."""
    broken = entry(CHAIN[2], Status.FAIL, "3 cases failed")
    entries = [OPENING, *map(entry, CHAIN[:2]), broken, *map(entry, CHAIN[3:])]
    state = progress.workflow(CPU, Profile.LANDING, BINDING, chained(*entries), PLAN)
    failed = next(record for record in state.records if record.phase is Phase.STATIC_AND_UNIT_GATE)
    assert (failed.status, failed.blocker) == (Status.FAIL, "unit: 3 cases failed")
    after = statuses(*entries)
    assert [after[phase] for phase in ("TARGET_NATIVE_CONTROL", "BASIC_E2E_GATE", "FINAL_AUDIT")] == [
        "SKIPPED"
    ] * 3
    assert state.readiness() == "not ready: STATIC_AND_UNIT_GATE is FAIL"
    assert statuses(*entries, entry(CHAIN[2]))["STATIC_AND_UNIT_GATE"] == "PASS", "a later PASS of it counts"


def test_a_qualifying_failure_in_another_environment_fails_its_phase() -> None:
    """A pass here makes it undone in neither order; a landing failure there says nothing."""
    passed = [msgspec.structs.replace(one, profile="qualifying") for one in (OPENING, *map(entry, CHAIN[:6]))]
    there = msgspec.structs.replace(
        entry(CHAIN[2], Status.FAIL, "3 cases failed", "qualifying"), environment="another"
    )
    for entries in ([there, *passed], [*passed, there]):
        assert statuses(*entries, profile=Profile.QUALIFYING)["STATIC_AND_UNIT_GATE"] == "FAIL"
    landed = msgspec.structs.replace(there, profile="landing")
    assert statuses(*passed, landed, profile=Profile.QUALIFYING)["STATIC_AND_UNIT_GATE"] == "PASS"


def test_a_phase_without_all_of_its_sessions_is_not_on_record_yet() -> None:
    """Five of six static sessions are no static gate; two of three shards no end-to-end gate."""
    assert "STATIC_AND_UNIT_GATE" not in statuses(OPENING, *map(entry, CHAIN[:5]))
    qualifying = [
        entry(part, profile="qualifying")
        for part in parts(CPU, Profile.QUALIFYING)
        if not part.shard.startswith("2/")
    ]
    opening = msgspec.structs.replace(OPENING, profile="qualifying")
    seen = statuses(opening, *qualifying, profile=Profile.QUALIFYING)
    assert list(seen)[-1] == "TARGET_NATIVE_CONTROL"


def test_a_blocked_identity_leaves_every_other_phase_out() -> None:
    """Nothing else is read or believed."""
    blocked = msgspec.structs.replace(OPENING, status=Status.BLOCKED, blocker="torch: another")
    seen = statuses(blocked, *map(entry, CHAIN))
    assert seen.pop("FREEZE_IDENTITY") == "BLOCKED"
    assert set(seen.values()) == {"SKIPPED"}


def test_records_of_another_binding_or_profile_are_no_progress() -> None:
    """A chain at an earlier revision says nothing of this one."""
    foreign = [msgspec.structs.replace(one, revision="x" * 64) for one in (OPENING, *map(entry, CHAIN))]
    assert statuses(*foreign) == {}
    assert statuses(OPENING, *map(entry, CHAIN), profile=Profile.QUALIFYING) == {}


def test_a_plan_that_did_not_pass_or_is_none_stops_the_workflow(tmp_path: Path) -> None:
    """A report whose architecture gate stopped is enough to stop a validation."""
    text = PLAN.read_text(encoding="utf-8")
    stopped = tmp_path / "plan.md"
    row = next(line for line in text.splitlines() if line.startswith("| ARCHITECTURE_GATE"))
    cells = row.split(" | ")
    stopped.write_text(
        text.replace(row, " | ".join([cells[0], "STOPPED", cells[2], "a seam disappeared", cells[4]])),
        encoding="utf-8",
    )
    state = progress.workflow(CPU, Profile.LANDING, BINDING, chained(OPENING), stopped)
    assert state.readiness() == "not ready: ARCHITECTURE_GATE is STOPPED"
    stopped.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(PhaseError, match=r"plan\.md has no row of INVENTORY_AFD_CONTRACTS"):
        progress.planned(stopped)


def test_the_command_shows_the_phases_of_the_chain_at_this_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 as far as all is well, 1 with a phase that did not pass; the binding is the last chain's."""
    monkeypatch.setattr(command.revision, "revision", lambda _: BINDING.revision)
    lock = CPU.lock_digest()
    for one, status in ((OPENING, 0), (entry(CHAIN[0], Status.FAIL, "a finding"), 1)):
        ledger.append(msgspec.structs.replace(one, lock=lock), tmp_path)
        words = ["--evidence", str(tmp_path), "phases", "--profile", "landing"]
        assert command.main(words) == status
    assert "blocker: lint: a finding" in capsys.readouterr().out


def test_the_phases_that_need_no_gpu_are_the_cpu_cells_at_the_same_revision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without that chain a GPU cell's workflow stands before its static gate, whatever its own records say."""
    gpu = load("h200x1")
    chain = parts(gpu, Profile.LANDING)
    records = chained(OPENING, *map(entry, chain))
    lacks: list[str] = ["on the cell cpu: lint: no record"]
    monkeypatch.setattr(progress.verify, "lacking_elsewhere", lambda *_: tuple(lacks))
    state = progress.workflow(gpu, Profile.LANDING, BINDING, records, PLAN)
    assert state.next_phase is Phase.STATIC_AND_UNIT_GATE
    lacks.clear()
    state = progress.workflow(gpu, Profile.LANDING, BINDING, records, PLAN)
    assert state.next_phase is Phase.CAPTURE_LESSONS_AND_REPORT
    found = {record.phase: record for record in state.records}
    assert "chain of the cell cpu" in found[Phase.DOCUMENTATION_REFRESH_GATE].evidence[0]
