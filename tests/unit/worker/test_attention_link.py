# SPDX-License-Identifier: Apache-2.0
"""One exchange as each rank of a lane makes it, and what of a worker's errors its peers are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn

from afd_plugin.config import Role
from afd_plugin.model.placeholders import RemoteDense
from afd_plugin.model.scan import BoundUnit
from afd_plugin.plan import RemoteUnit, StepKind, UnitKind
from afd_plugin.v1.worker import attention_link
from afd_plugin.v1.worker.attention_link import AttentionLink
from afd_plugin.v1.worker.attention_role import told

pytestmark = pytest.mark.vllm

UNIT = RemoteUnit(0, "layers.0.mlp", UnitKind.DENSE)


class Events(list[str]):
    """A lane's control plane, data plane and group, which write down what is asked of them."""

    world_size = 2
    stream_ordered = True

    def check(self) -> None:
        pass

    def announce(self, plan: object) -> None:
        pass

    def send_hidden(self, *message: object) -> None:
        self.append("send")

    def recv_output(self, exchange: object, rows: int) -> torch.Tensor:
        self.append("receive")
        return torch.zeros(rows, 4)

    def broadcast(self, output: torch.Tensor, source: int) -> torch.Tensor:
        self.append("broadcast")
        return output

    def gave_way(self) -> None:
        self.append("give way")


@pytest.mark.parametrize(
    ("leads", "stages", "expected"),
    [
        (True, (3, 2), ["send", "give way", "receive", "broadcast"]),
        (False, (3, 2), ["give way", "broadcast"]),
        (True, (3,), ["send", "receive", "broadcast"]),
        (False, (3,), ["broadcast"]),
    ],
    ids=["leader-staged", "follower-staged", "leader", "follower"],
)
def test_every_rank_of_a_lane_gives_way_to_the_other_stage_before_it_broadcasts(
    monkeypatch: pytest.MonkeyPatch, leads: bool, stages: tuple[int, ...], expected: list[str]
) -> None:
    """Ranks that differ in it enqueue their collectives in different orders, and wait for each other for ever."""
    events: Any = Events()
    monkeypatch.setattr(attention_link, "dbo_yield", events.gave_way)
    monkeypatch.setattr(attention_link, "dbo_current_ubatch_id", lambda: 0)
    plane = events if leads else None
    bound = BoundUnit(UNIT, RemoteDense(Role.FFN, nn.Identity()))
    link = AttentionLink(0, [bound], events, plane, plane)
    link.begin(link.step(StepKind.REAL, (stages,))._plan)  # type: ignore[attr-defined]
    link.exchange(UNIT, torch.zeros(3, 4), None)
    assert events == expected


def test_what_a_call_of_the_executor_raises_is_told_once_and_raised_on() -> None:
    failures: list[BaseException] = []
    worker: Any = SimpleNamespace(_fail=failures.append)

    @told
    def call(self: Any, error: BaseException | None) -> str:
        if error is not None:
            raise error
        return "done"

    assert call(worker, None) == "done"
    planted = FloatingPointError("planted")
    with pytest.raises(FloatingPointError, match="planted"):
        call(worker, planted)
    with pytest.raises(SystemExit):  # asked to end: what handles the signal tells it
        call(worker, SystemExit(0))
    assert failures == [planted]
