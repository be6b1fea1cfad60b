# SPDX-License-Identifier: Apache-2.0
"""What the GPU's FFN service does between announcements; without a GPU, so without the steps themselves."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from afd_plugin.errors import PeerLost
from afd_plugin.v1.worker.ffn_graphs import FAULT_CHECK_S, GraphedFFNService
from afd_plugin.v1.worker.ffn_service import KEEP_ALIVE_S


class Faulty:
    """A connector whose kernel has found a fault."""

    def check(self) -> None:
        raise PeerLost("a message was not the one that was due.")


def service(*finished: bool) -> tuple[GraphedFFNService, list[float]]:
    """The service with these steps enqueued and no announcement to come; the waits that it makes."""
    waits: list[float] = []
    made = GraphedFFNService.__new__(GraphedFFNService)
    made._in_flight = deque(SimpleNamespace(query=lambda done=done: done) for done in finished)  # type: ignore[misc]
    made._control = SimpleNamespace(next_event=waits.append)  # type: ignore[assignment]
    made._connector = Faulty()  # type: ignore[assignment]
    made._tensor_parallel = SimpleNamespace(world_size=1)  # type: ignore[assignment]
    made._group, made._sharing = 0, (0,)
    return made, waits


def test_a_fault_of_an_unfinished_step_is_raised_without_another_announcement() -> None:
    """The lane whose answer is missing announces nothing more."""
    made, waits = service(True, False)
    with pytest.raises(PeerLost, match="not the one that was due"):
        made._next_event()
    assert waits == [FAULT_CHECK_S]


def test_an_idle_service_wakes_no_more_often_than_before() -> None:
    for finished in ((), (True, True)):
        made, waits = service(*finished)
        with pytest.raises(PeerLost):
            made._next_event()
        assert waits == [KEEP_ALIVE_S]
