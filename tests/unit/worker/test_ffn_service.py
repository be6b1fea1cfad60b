# SPDX-License-Identifier: Apache-2.0
"""The FFN's loop over one world of several groups: every lane gets the answer to its own rows, whoever brings none."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig

from afd_plugin.control import Shutdown
from afd_plugin.errors import ProtocolError
from afd_plugin.model.scan import BoundUnit
from afd_plugin.plan import Exchange, RemoteUnit, StepKind, StepPlan, UnitKind
from afd_plugin.topology import Topology
from afd_plugin.v1.worker.ffn_service import FFNService

pytestmark = pytest.mark.vllm

HIDDEN = 8
TOPOLOGY = Topology(attention_dp=4, ffn_dp=2)
UNITS = (
    RemoteUnit(0, "layers.0.mlp.experts", UnitKind.DENSE, router_logits=2),
    RemoteUnit(1, "layers.1.mlp.experts", UnitKind.DENSE),
)


class World:
    """A tensor-parallel world of threads: vLLM's broadcasts over a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._value: Any = None

    def end(self) -> None:
        """Wake whoever waits: a rank has failed."""
        self._barrier.abort()

    def exchange(self, value: Any, mine: bool) -> Any:
        """What the source gave; every rank calls it."""
        if mine:
            self._value = value
        self._barrier.wait()
        found = self._value
        self._barrier.wait()
        return found


@dataclass
class Rank:
    """One rank's view of the world, with the part of a `GroupCoordinator` that the service uses."""

    world: World
    rank_in_group: int

    @property
    def world_size(self) -> int:
        return self.world.size

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        mine = src == self.rank_in_group
        found = self.world.exchange(tensor.clone() if mine else None, mine)
        return tensor.copy_(found)

    def broadcast_object(self, value: Any, src: int) -> Any:
        return self.world.exchange(value, src == self.rank_in_group)


def rows_of(lane: int, exchange: Exchange, count: int) -> torch.Tensor:
    """Rows that tell their lane, step and unit."""
    base = torch.arange(count * HIDDEN, dtype=torch.float32).view(count, HIDDEN)
    return base + 1000 * lane + 100_000 * exchange.unit + 1_000_000 * exchange.step


@dataclass
class Lanes:
    """The connector of one group's leader, with lanes behind it that send and compare."""

    lanes: tuple[int, ...]
    answers: int = 0

    def recv_hidden(
        self, exchange: Exchange, unit: RemoteUnit, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = torch.cat(
            [rows_of(lane, exchange, count) for lane, count in zip(self.lanes, rows, strict=True)]
        )
        logits = (
            hidden[:, : unit.router_logits].to(torch.bfloat16) if unit.router_logits and len(hidden) else None
        )
        return hidden, logits

    def send_output(self, exchange: Exchange, rows: Sequence[int], output: torch.Tensor) -> None:
        expected = [rows_of(lane, exchange, count) * 2 for lane, count in zip(self.lanes, rows, strict=True)]
        assert torch.equal(output, torch.cat(expected))
        self.answers += sum(count > 0 for count in rows)


@dataclass
class Announcements:
    """The control plane of one group's leader."""

    events: deque[Any] = field(default_factory=deque)

    def next_event(self, timeout_s: float) -> Any:
        return self.events.popleft()


def service(group: int, rank: Rank, events: Sequence[Any], connector: Lanes) -> FFNService:
    """The service of one leader, computing rows times two."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32)  # type: ignore[assignment]

    def double(hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    units = [BoundUnit(unit, double) for unit in UNITS]  # type: ignore[arg-type]
    return FFNService(
        config,
        TOPOLOGY,
        group,
        units,
        rank,
        Announcements(deque(events)),
        connector,
        lambda start, prefix: None,  # type: ignore[arg-type]
    )


def run(plans: Sequence[Sequence[Any]]) -> list[Lanes]:
    """Serve `plans[group]` on both leaders of the world at once."""
    world = World(2)
    ends = [Lanes(TOPOLOGY.lanes_of(group)) for group in range(2)]
    services = [service(group, Rank(world, group), plans[group], ends[group]) for group in range(2)]

    def serve(one: FFNService) -> None:
        try:
            one.serve()
        except BaseException:
            world.end()
            raise

    with ThreadPoolExecutor(2) as pool:
        errors = [future.exception() for future in [pool.submit(serve, one) for one in services]]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert services[0].counts.exchanges == services[1].counts.exchanges
    return ends


def plan(step: int, *tokens: int, kind: StepKind = StepKind.REAL) -> StepPlan:
    return StepPlan(step, kind, tuple((count,) for count in tokens))


def test_unequal_and_empty_lanes_groups_and_steps_come_back_to_their_lanes() -> None:
    layouts = [(1, 2, 3, 4), (5, 0, 0, 1), (0, 0, 2, 2), (7, 7, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0)]
    steps = [plan(number, *layout) for number, layout in enumerate(layouts)]
    ends = run([[*steps, Shutdown(1)], [*steps, Shutdown(1)]])
    for end in ends:
        due = sum(layout[lane] > 0 for layout in layouts for lane in end.lanes)
        assert end.answers == due * len(UNITS)


def test_a_group_whose_lanes_have_no_request_runs_a_dummy_of_the_same_step() -> None:
    real, dummy = plan(0, 3, 1, 1, 1), plan(0, 3, 1, 1, 1, kind=StepKind.DUMMY)
    run([[real, Shutdown(1)], [dummy, Shutdown(1)]])


@pytest.mark.parametrize("other", [plan(1, 1, 1, 1, 1), plan(0, 1, 1, 1, 2), Shutdown(1)])
def test_groups_that_announce_different_steps_are_a_protocol_error(other: Any) -> None:
    with pytest.raises(ProtocolError, match="FFN group 1 announced"):
        run([[plan(0, 1, 1, 1, 1), Shutdown(1)], [other, Shutdown(1)]])
