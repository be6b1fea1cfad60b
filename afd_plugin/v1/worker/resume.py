# SPDX-License-Identifier: Apache-2.0
"""Where a step goes on after the FFN has been started again. Pure: no socket, no thread, no clock.

Every lane counts the exchanges it has completed since its start, its *position*; all lanes have the same steps and
units, so positions compare. When the FFN has died, each lane stops where it is and brings its position to the new
rendezvous, whose directory shows every lane all of them. They agree without another message:

* The step goes on at the lowest position. The FFN computes the rows of all lanes of an exchange together and answers
  only then, so a lane that brings rows is at most one exchange ahead of another one that does.
* A lane at the lowest position, inside the step that this position belongs to, announces the step again and goes on.
* A lane one exchange ahead announces it too, sends its rows of that exchange once more, so that the FFN computes the
  very batch it computed before, and drops the answer, which it has already.
* A lane without rows in the step announces it and has nothing to send.
* A position at the end of a step that every lane has finished belongs to no begun step: nothing is announced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from afd_plugin.errors import NotResumable
from afd_plugin.plan import Exchange, RemoteUnit, StepKind, StepPlan

POSITION_KEY = "completed"
"""Under which a lane's position travels in its directory entry."""


@dataclass(frozen=True)
class Sent:
    """What a lane sent for one exchange: its rows, and router logits where attention computes them."""

    exchange: Exchange
    unit: RemoteUnit
    hidden: Any
    router_logits: Any


def eager(plan: StepPlan) -> bool:
    """Whether the exchanges of ``plan`` are made one by one, so that it can go on from any of them."""
    return not plan.graph and plan.stages == 1 and plan.kind is not StepKind.CAPTURE


@dataclass
class Progress:
    """How far one lane has come. ``units`` is the number of exchanges of a step.

    ``last`` is what was sent for the last completed exchange; None where no other lane can ask for it.
    """

    lane: int
    units: int
    plan: StepPlan | None = None
    completed: int = 0
    last: Sent | None = field(default=None, repr=False)

    def begin(self, plan: StepPlan) -> None:
        """The lane is about to announce ``plan``; without rows it has nothing to exchange in it."""
        self.plan = plan
        self.completed = 0 if plan.lane_tokens(self.lane) else self.units

    def complete(self, sent: Sent | None) -> None:
        """An answer has arrived."""
        self.completed += 1
        self.last = sent

    def finish(self) -> None:
        """The step has ended; one that replayed a graph has counted nothing."""
        self.completed = self.units

    @property
    def can_go_on(self) -> bool:
        """Whether the lane is between steps, or in one whose layers run one by one."""
        return self.plan is None or self.completed == self.units or eager(self.plan)

    @property
    def position(self) -> int:
        """Exchanges completed since the start, those of steps without rows included."""
        return 0 if self.plan is None else self.plan.step * self.units + self.completed


class Action(Enum):
    """What a lane does first in the FFN's new life."""

    NOTHING = "nothing"
    ANNOUNCE = "announce"
    REPLAY = "announce, send the last rows again and drop the answer"


@dataclass(frozen=True)
class Resumption:
    """The action, and for all but NOTHING the plan to announce."""

    action: Action
    plan: StepPlan | None = None


def decide(progress: Progress, positions: Sequence[int]) -> Resumption:
    """What the lane of ``progress`` does when the lanes have come as far as ``positions``, its own among them.

    Raises:
        NotResumable: The step was no plain eager one, or the lanes are further apart than they can be.
    """
    lowest = min(positions)
    ahead = progress.position - lowest
    plan = progress.plan
    if plan is None or lowest // progress.units != plan.step:
        if ahead:
            raise NotResumable(
                f"Attention lane {progress.lane} has completed {progress.position} exchanges and another lane "
                f"{lowest}, which is in an earlier step."
            )
        return Resumption(Action.NOTHING)
    if not eager(plan):
        raise NotResumable(
            f"Step {plan.step} was interrupted, and is no eager step in one stage: its layers ran without Python."
        )
    again = plan._replace(resume=lowest % progress.units)
    if not ahead or not plan.lane_tokens(progress.lane):
        return Resumption(Action.ANNOUNCE, again)
    if ahead > 1 or progress.last is None:
        raise NotResumable(
            f"Attention lane {progress.lane} is {ahead} exchanges ahead of another lane in step {plan.step}; "
            "it keeps what it sent for the last one only."
        )
    return Resumption(Action.REPLAY, again)


def positions_of(lanes: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """The positions in the directory entries of all attention lanes.

    Raises:
        NotResumable: A lane does not say how far it has come.
    """
    found = [entry.get(POSITION_KEY, "") for entry in lanes]
    missing = [index for index, text in enumerate(found) if not text.isdigit()]
    if missing:
        raise NotResumable(
            f"Attention lane {missing[0]} did not say how far it has come; start all lanes with the same "
            "--ffn-restart-window."
        )
    return tuple(map(int, found))
