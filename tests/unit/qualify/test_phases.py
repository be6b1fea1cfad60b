# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from qualify.phases import (
    ORDER,
    SCOPES,
    Mode,
    Phase,
    PhaseError,
    PhaseRecord,
    Status,
    Workflow,
    report,
)


def passed(phase: Phase) -> PhaseRecord:
    return PhaseRecord(phase, Status.PASS, ("evidence",), "none", "go on")


def walk(mode: Mode, until: Phase, *, hardware: bool = False) -> Workflow:
    """Pass every phase before `until` that the mode runs."""
    state = Workflow(mode, hardware=hardware)
    for phase in ORDER[: ORDER.index(until)]:
        runs = state.in_scope(phase)
        state = state.after(passed(phase) if runs else PhaseRecord(phase, Status.SKIPPED, (), "", "go on"))
    return state


def test_phases_come_in_their_order_only() -> None:
    with pytest.raises(PhaseError, match="next is FREEZE_IDENTITY"):
        Workflow(Mode.IMPLEMENTATION).after(passed(Phase.DIFF_VLLM))
    with pytest.raises(PhaseError, match="next is INVENTORY"):
        walk(Mode.IMPLEMENTATION, Phase.INVENTORY_AFD_CONTRACTS).after(passed(Phase.FREEZE_IDENTITY))


@pytest.mark.parametrize("status", [Status.FAIL, Status.BLOCKED, Status.STOPPED])
def test_after_a_phase_that_did_not_pass_every_later_one_is_skipped(status: Status) -> None:
    state = Workflow(Mode.PLANNING_AUDIT).after(
        PhaseRecord(Phase.FREEZE_IDENTITY, status, (), "two commits are named", "decide in the decision file")
    )
    with pytest.raises(PhaseError, match=rf"FREEZE_IDENTITY is {status.value} \(two commits are named\)"):
        state.after(passed(Phase.INVENTORY_AFD_CONTRACTS))
    done = state.finished()
    assert [record.status for record in done.records[1:]] == [Status.SKIPPED] * 12
    assert {record.next_allowed_action for record in done.records} == {"decide in the decision file"}
    assert done.readiness() == f"not ready: FREEZE_IDENTITY is {status.value}"


def test_planning_ends_with_the_plan() -> None:
    state = walk(Mode.PLANNING_AUDIT, Phase.IMPLEMENT_ATOMIC_ADAPTATIONS)
    with pytest.raises(PhaseError, match="out of scope of planning-audit"):
        state.after(passed(Phase.IMPLEMENT_ATOMIC_ADAPTATIONS))
    assert state.finished().readiness() == "planned"
    assert Workflow(Mode.PLANNING_AUDIT).readiness() == "incomplete"


def test_an_implementation_without_hardware_is_gpu_unverified_and_with_it_validated() -> None:
    assert (
        walk(Mode.IMPLEMENTATION, ORDER[-1]).after(passed(ORDER[-1])).readiness()
        == "implemented, GPU-unverified"
    )
    full = walk(Mode.IMPLEMENTATION, ORDER[-1], hardware=True).after(passed(ORDER[-1]))
    assert full.readiness() == "validated"
    assert not [record for record in full.records if record.status is Status.SKIPPED]
    with pytest.raises(PhaseError, match="all phases are recorded"):
        full.after(passed(ORDER[-1]))


def test_final_validation_implements_nothing() -> None:
    state = walk(Mode.FINAL_VALIDATION, Phase.IMPLEMENT_ATOMIC_ADAPTATIONS)
    with pytest.raises(PhaseError, match="out of scope of final-validation"):
        state.after(passed(Phase.IMPLEMENT_ATOMIC_ADAPTATIONS))
    assert walk(Mode.FINAL_VALIDATION, Phase.FINAL_AUDIT).readiness() == "incomplete: FINAL_AUDIT is next"


def test_a_phase_that_could_run_cannot_be_skipped() -> None:
    skipped = PhaseRecord(Phase.FREEZE_IDENTITY, Status.SKIPPED, (), "", "go on")
    with pytest.raises(PhaseError, match="must run"):
        Workflow(Mode.PLANNING_AUDIT).after(skipped)
    with pytest.raises(PhaseError, match="must run"):
        Workflow(Mode.PLANNING_AUDIT).finished()


@pytest.mark.parametrize(
    ("status", "evidence", "blocker", "action", "said"),
    [
        (Status.BLOCKED, (), "none", "x", "names no blocker"),
        (Status.PASS, ("a",), "something", "x", "PASS but names the blocker"),
        (Status.PASS, (), "none", "x", "without evidence"),
        (Status.PASS, ("a",), "none", " ", "no next allowed action"),
    ],
)
def test_a_record_says_all_that_the_workflow_asks(
    status: Status, evidence: tuple[str, ...], blocker: str, action: str, said: str
) -> None:
    with pytest.raises(PhaseError, match=said):
        PhaseRecord(Phase.DIFF_VLLM, status, evidence, blocker, action)


def test_the_report_has_the_five_lines_of_each_record() -> None:
    text = report(walk(Mode.PLANNING_AUDIT, Phase.DIFF_VLLM))
    assert text.startswith(
        "mode: planning-audit\n\nphase: FREEZE_IDENTITY\nstatus: PASS\nevidence: evidence\n"
    )
    assert "blocker: none\nnext_allowed_action: go on" in text
    assert set(SCOPES) == set(Mode)
