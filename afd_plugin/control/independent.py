# SPDX-License-Identifier: Apache-2.0
"""One sequence of events out of lanes that know nothing of each other: attention engines of their own.

Rules, in which it differs from :mod:`afd_plugin.control.merge`:

* A step is delivered as soon as it is announced, and belongs to its lane alone: every other lane has no rows in it.
  Lanes take turns, so none waits for more than one step of each other lane.
* Step numbers grow on every lane by themselves; two lanes may use the same.
* A lane may shut down while others go on; the Shutdown is delivered when all have.
"""

from __future__ import annotations

from afd_plugin.control.merge import Event, Merger
from afd_plugin.control.messages import Shutdown, Step
from afd_plugin.errors import ProtocolError


class IndependentMerger(Merger):
    """Takes turns between ``lanes``."""

    _turn = 0

    def next(self) -> Event | None:
        """The next event, or ``None`` while nobody has announced anything.

        Raises:
            ProtocolError: A lane announced rows of another.
        """
        lanes = list(self._queues)
        for offset in range(len(lanes)):
            position = (self._turn + offset) % len(lanes)
            event = self._of_lane(lanes[position])
            if event is not None:
                self._turn = (position + 1) % len(lanes)
                return event
        return None if self.running else Shutdown(self._epoch)

    def _of_lane(self, lane: int) -> Event | None:
        queue = self._queues[lane]
        while queue:
            message = queue.popleft()
            if isinstance(message, Step):
                return self._alone(lane, message)
            event = self._take(lane, message)
            if event is not None:
                return event
        return None

    def _alone(self, lane: int, step: Step) -> Event:
        plan = step.plan()
        others = [other for other in range(self._all_lanes) if other != lane and plan.lane_tokens(other)]
        if others:
            raise ProtocolError(
                f"Attention lane {lane}, an engine of its own, announced step {step.step} "
                f"with rows of lane {others[0]}."
            )
        self._statistics.steps_delivered += 1
        return plan
