# SPDX-License-Identifier: Apache-2.0
"""One sequence of events out of what the lanes of one FFN group send. Pure: no socket, no clock.

Rules:

* A step is delivered when every lane of the group has announced it; the announcements must be equal, except that
  a lane without requests runs a dummy while another runs a real step. The merged step is then real.
* Step numbers grow on every lane.
* The n-th Profile of the group is delivered when the first lane sends its n-th; the same from the others is
  redundant. Lanes may receive a profile request between different steps.
* Drain is delivered when every lane has sent it, and stops nothing.
* Shutdown is delivered when every lane has sent it. A step that cannot complete because another lane of the
  group has shut down is :class:`~afd_plugin.errors.PeerShutDown`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias, Union

import msgspec

from afd_plugin.control.messages import Drain, InBand, Profile, Shutdown, Step
from afd_plugin.control.statistics import Statistics
from afd_plugin.errors import PeerShutDown, ProtocolError
from afd_plugin.plan import StepKind, StepPlan

Event: TypeAlias = Union[StepPlan, Profile, Drain, Shutdown]  # noqa: UP007
"""What an FFN group acts on."""


class Merger:
    """Merges the announcements of ``lanes``.

    Args:
        epoch: Messages of another epoch are dropped and counted.
        lanes: The lanes of this group.
        all_lanes: Lanes of the topology: the length of every token vector.
        max_tokens: Upper bound of rows per lane and step.
        statistics: Where drops and steps are counted.
    """

    def __init__(
        self, epoch: int, lanes: Sequence[int], all_lanes: int, max_tokens: int, statistics: Statistics
    ) -> None:
        self._epoch = epoch
        self._all_lanes = all_lanes
        self._max_tokens = max_tokens
        self._statistics = statistics
        self._queues: dict[int, deque[InBand]] = {lane: deque() for lane in lanes}
        self._last_step = dict.fromkeys(lanes, -1)
        self._profiles = dict.fromkeys(lanes, 0)
        self._profiles_delivered = 0
        self._drained: set[int] = set()
        self._drain_due = True
        self._ending: set[int] = set()
        self._ended: set[int] = set()

    @property
    def running(self) -> tuple[int, ...]:
        """The lanes that have not shut down."""
        return tuple(lane for lane in self._queues if lane not in self._ended)

    @property
    def ended(self) -> tuple[int, ...]:
        """The lanes that have shut down."""
        return tuple(sorted(self._ended))

    def push(self, lane: int, message: InBand) -> None:
        """Take one message of ``lane``, in the order in which it was sent.

        Raises:
            ProtocolError: The message contradicts an earlier one of this lane, or the topology.
        """
        if message.epoch != self._epoch:
            self._statistics.dropped["stale-epoch"] += 1
            return
        if lane in self._ending:
            raise ProtocolError(f"Attention lane {lane} sent {type(message).__name__} after its Shutdown.")
        if isinstance(message, Step):
            self._check_step(lane, message)
        elif isinstance(message, Shutdown):
            self._ending.add(lane)
        self._queues[lane].append(message)

    def end(self, lane: int) -> None:
        """Count ``lane`` as shut down after what it has sent, although it did not say so."""
        if lane not in self._ending:
            self.push(lane, Shutdown(self._epoch))

    def next(self) -> Event | None:
        """The next event, or ``None`` while a lane's part is missing.

        Raises:
            ProtocolError: Two lanes announced different things for the same step.
            PeerShutDown: A lane announced a step that another lane can no longer join.
        """
        for lane, queue in self._queues.items():
            while queue and not isinstance(queue[0], Step):
                event = self._take(lane, queue.popleft())
                if event is not None:
                    return event
        steps = {lane: queue[0] for lane, queue in self._queues.items() if queue}
        if not steps:
            return None if self.running else Shutdown(self._epoch)
        if self._ended:
            lane, step = next(iter(steps.items()))
            raise PeerShutDown(
                f"Attention lane {min(self._ended)} has shut down, but attention lane {lane} announced "
                f"{_shown(step)}; all lanes of an FFN group must stop together."
            )
        return self._merged(steps) if len(steps) == len(self._queues) else None

    def _take(self, lane: int, message: InBand) -> Event | None:
        """Account for one message that is no step; returns it when it is the one to deliver."""
        if isinstance(message, Profile):
            self._profiles[lane] += 1
            if self._profiles[lane] > self._profiles_delivered:
                self._profiles_delivered += 1
                return message
            self._statistics.dropped["redundant"] += 1
        elif isinstance(message, Drain):
            self._drained.add(lane)
            if self._drain_due and len(self._drained) == len(self._queues):
                self._drain_due = False
                return message
        else:
            self._ended.add(lane)
        return None

    def _check_step(self, lane: int, step: Step) -> None:
        self._statistics.steps_received += 1
        if step.step <= self._last_step[lane]:
            raise ProtocolError(
                f"Attention lane {lane} announced step {step.step} after step {self._last_step[lane]}; "
                "step numbers must grow."
            )
        self._last_step[lane] = step.step
        try:
            step.plan().check(self._all_lanes, self._max_tokens)
        except (ValueError, IndexError) as error:
            raise ProtocolError(f"Attention lane {lane}: {error}") from None

    def _merged(self, heads: dict[int, InBand]) -> StepPlan:
        first, reference = next(iter(heads.items()))
        assert isinstance(reference, Step)  # noqa: S101 - every other message has been taken
        served = set()
        for lane, step in heads.items():
            assert isinstance(step, Step)  # noqa: S101 - every other message has been taken
            served.add(step.kind)
            if _without_service(step) != _without_service(reference):
                raise ProtocolError(
                    f"Attention lanes {first} and {lane} disagree about what runs next: "
                    f"{_shown(reference)} against {_shown(step)}."
                )
        for queue in self._queues.values():
            queue.popleft()
        self._statistics.steps_delivered += 1
        plan = reference.plan()
        return plan._replace(kind=StepKind.REAL) if StepKind.REAL in served else plan


def _without_service(step: Step) -> Step:
    """``step`` without whether this lane had requests in it: what all lanes must agree on."""
    return msgspec.structs.replace(step, kind=StepKind.REAL) if step.kind is StepKind.DUMMY else step


def _shown(step: InBand) -> str:
    if not isinstance(step, Step):
        return type(step).__name__
    mode = "graph" if step.graph else "eager"
    resumed = f", resumed at exchange {step.resume}" if step.resume else ""
    return f"step {step.step} ({step.kind.value}, {mode}{resumed}) with tokens {step.tokens}"
