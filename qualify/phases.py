# SPDX-License-Identifier: Apache-2.0
"""The upgrade workflow as a state machine: thirteen phases in order, three modes, one record per phase.

A later phase cannot be recorded as done while an earlier one is not PASS. The mode says which phases are in reach.
Pure: no file is touched.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Status(str, enum.Enum):
    """How a phase ended."""

    PASS = "PASS"  # noqa: S105 (a status, not a password)
    FAIL = "FAIL"
    BLOCKED = "BLOCKED"
    STOPPED = "STOPPED"
    SKIPPED = "SKIPPED"


class Phase(str, enum.Enum):
    """The phases in their order."""

    FREEZE_IDENTITY = "FREEZE_IDENTITY"
    INVENTORY_AFD_CONTRACTS = "INVENTORY_AFD_CONTRACTS"
    DIFF_VLLM = "DIFF_VLLM"
    ARCHITECTURE_GATE = "ARCHITECTURE_GATE"
    PRODUCE_STAGED_PLAN = "PRODUCE_STAGED_PLAN"
    IMPLEMENT_ATOMIC_ADAPTATIONS = "IMPLEMENT_ATOMIC_ADAPTATIONS"
    STATIC_AND_UNIT_GATE = "STATIC_AND_UNIT_GATE"
    TARGET_NATIVE_CONTROL = "TARGET_NATIVE_CONTROL"
    BASIC_E2E_GATE = "BASIC_E2E_GATE"
    ACCURACY_GATE = "ACCURACY_GATE"
    DOCUMENTATION_REFRESH_GATE = "DOCUMENTATION_REFRESH_GATE"
    FINAL_AUDIT = "FINAL_AUDIT"
    CAPTURE_LESSONS_AND_REPORT = "CAPTURE_LESSONS_AND_REPORT"


ORDER = tuple(Phase)
_HARDWARE = (Phase.TARGET_NATIVE_CONTROL, Phase.BASIC_E2E_GATE, Phase.ACCURACY_GATE)


class Mode(str, enum.Enum):
    """What a task was asked to do; exactly one."""

    PLANNING_AUDIT = "planning-audit"
    IMPLEMENTATION = "implementation"
    FINAL_VALIDATION = "final-validation"


@dataclass(frozen=True)
class Scope:
    """What a mode reaches: up to which phase, and which of them it leaves out."""

    last: Phase
    not_run: frozenset[Phase] = frozenset()


SCOPES = {
    Mode.PLANNING_AUDIT: Scope(Phase.PRODUCE_STAGED_PLAN),
    Mode.IMPLEMENTATION: Scope(Phase.CAPTURE_LESSONS_AND_REPORT),
    Mode.FINAL_VALIDATION: Scope(
        Phase.CAPTURE_LESSONS_AND_REPORT, frozenset({Phase.IMPLEMENT_ATOMIC_ADAPTATIONS})
    ),
}


@dataclass(frozen=True)
class PhaseRecord:
    """What must be said at every phase boundary.

    `evidence` names commits, files, commands, tests, logs or reports. A record that is neither PASS nor SKIPPED
    says in `blocker` what is in the way, and `next_allowed_action` is one action.
    """

    phase: Phase
    status: Status
    evidence: tuple[str, ...]
    blocker: str
    next_allowed_action: str

    def __post_init__(self) -> None:
        """Refuse a record that does not say what the workflow wants to know."""
        if self.status in (Status.FAIL, Status.BLOCKED, Status.STOPPED) and self.blocker in ("", "none"):
            raise PhaseError(f"{self.phase.value} is {self.status.value} and names no blocker")
        if self.status is Status.PASS and self.blocker not in ("", "none"):
            raise PhaseError(f"{self.phase.value} is PASS but names the blocker {self.blocker!r}")
        if self.status is Status.PASS and not self.evidence:
            raise PhaseError(f"{self.phase.value} is PASS without evidence")
        if not self.next_allowed_action.strip():
            raise PhaseError(f"{self.phase.value} names no next allowed action")

    def render(self) -> str:
        """The five lines of the workflow's own form."""
        lines = (
            f"phase: {self.phase.value}",
            f"status: {self.status.value}",
            f"evidence: {'; '.join(self.evidence) or 'none'}",
            f"blocker: {self.blocker or 'none'}",
            f"next_allowed_action: {self.next_allowed_action}",
        )
        return "\n".join(lines)


class PhaseError(ValueError):
    """A record that breaks the order, the mode or the form; the message says which rule."""


@dataclass(frozen=True)
class Workflow:
    """One task: its mode and the records so far, in phase order. `after` gives the next state or refuses."""

    mode: Mode
    records: tuple[PhaseRecord, ...] = ()
    hardware: bool = False  # whether an implementation task includes the hardware gates

    @property
    def next_phase(self) -> Phase | None:
        """The only phase that may be recorded now; None when all are."""
        return ORDER[len(self.records)] if len(self.records) < len(ORDER) else None

    @property
    def stopped_by(self) -> PhaseRecord | None:
        """The first record that keeps later phases from running."""
        bad = (Status.FAIL, Status.BLOCKED, Status.STOPPED)
        return next((record for record in self.records if record.status in bad), None)

    def in_scope(self, phase: Phase) -> bool:
        """Whether this task runs `phase` at all; a phase out of scope can only be SKIPPED."""
        scope = SCOPES[self.mode]
        if phase in scope.not_run or ORDER.index(phase) > ORDER.index(scope.last):
            return False
        return self.hardware or self.mode is not Mode.IMPLEMENTATION or phase not in _HARDWARE

    def after(self, record: PhaseRecord) -> Workflow:
        """The workflow with one record more.

        Raises PhaseError when the phase is not the next one, runs though an earlier one did not pass, runs out
        of the mode's scope, or is skipped though it could run.
        """
        expected = self.next_phase
        if record.phase is not expected:
            wanted = expected.value if expected else "nothing: all phases are recorded"
            raise PhaseError(f"{record.phase.value} cannot be recorded now; next is {wanted}")
        runnable = self.stopped_by is None and self.in_scope(record.phase)
        if record.status is not Status.SKIPPED and not runnable:
            cause = self.stopped_by
            why = (
                f"{cause.phase.value} is {cause.status.value} ({cause.blocker})"
                if cause
                else f"it is out of scope of {self.mode.value}"
            )
            raise PhaseError(f"{record.phase.value} cannot be {record.status.value}: {why}")
        if record.status is Status.SKIPPED and runnable:
            raise PhaseError(f"{record.phase.value} is in scope and nothing before it failed: it must run")
        return Workflow(self.mode, (*self.records, record), self.hardware)

    def finished(self) -> Workflow:
        """The workflow with every remaining phase that cannot run recorded as SKIPPED.

        Raises PhaseError when the next phase could still run.
        """
        state = self
        while state.next_phase is not None:
            cause = state.stopped_by
            why = (
                f"{cause.phase.value} is {cause.status.value}" if cause else f"not part of {state.mode.value}"
            )
            action = cause.next_allowed_action if cause else "report"
            state = state.after(PhaseRecord(state.next_phase, Status.SKIPPED, (), why, action))
        return state

    def readiness(self) -> str:
        """What may be claimed at the end, in the workflow's words."""
        if self.stopped_by is not None:
            return f"not ready: {self.stopped_by.phase.value} is {self.stopped_by.status.value}"
        if self.mode is Mode.PLANNING_AUDIT:
            return "planned" if len(self.records) > ORDER.index(Phase.PRODUCE_STAGED_PLAN) else "incomplete"
        if self.next_phase is not None:
            return f"incomplete: {self.next_phase.value} is next"
        return (
            "validated"
            if self.hardware or self.mode is Mode.FINAL_VALIDATION
            else "implemented, GPU-unverified"
        )


def report(workflow: Workflow) -> str:
    """All records in the workflow's form, and the readiness."""
    parts: Sequence[str] = [record.render() for record in workflow.records]
    return "\n\n".join([f"mode: {workflow.mode.value}", *parts, f"readiness: {workflow.readiness()}"]) + "\n"
