# SPDX-License-Identifier: Apache-2.0
"""The attention end of a running service: announces steps and carries out their exchanges.

Every attention worker has one. In a lane of several tensor-parallel ranks only rank 0, the leader, owns a control link
and a connector; the others receive each output by vLLM's own broadcast.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType

import torch
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_yield

from afd_plugin.connectors.base import AFDConnector
from afd_plugin.control import AttentionControl
from afd_plugin.errors import DrainTimeout, ProtocolError
from afd_plugin.model.placeholders import RemoteCall, RemoteDense
from afd_plugin.model.remote_runner import RemoteMoERunner
from afd_plugin.model.scan import BoundUnit
from afd_plugin.plan import Exchange, RemoteUnit, StepKind, StepPlan
from afd_plugin.report import stopping_for
from afd_plugin.v1.worker.ranges import RANGES
from afd_plugin.v1.worker.role_report import RECENT
from afd_plugin.v1.worker.step_tracing import StepTracing, span_of
from afd_plugin.v1.worker.verdict import verdict

DRAIN_CHECK_S = 0.2
"""How often the launcher is asked whether it stops: a look at a file, too dear for every step."""


@dataclass
class StepCounts:
    """What a worker did, for metrics and tests; seconds are host time.

    ``exchange_seconds`` are inside exchanges, ``wait_seconds`` of these for the answer; ``announce_seconds`` is all
    that comes before a forward pass: checks and the announcement.
    """

    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys((kind.value for kind in StepKind), 0))
    graph_steps: int = 0
    microbatched_steps: int = 0
    tokens: int = 0
    exchanges: int = 0
    exchange_seconds: float = 0.0
    wait_seconds: float = 0.0
    announce_seconds: float = 0.0
    reconnects: int = 0

    def note(self, plan: StepPlan, tokens: int) -> None:
        self.steps[plan.kind.value] += 1
        self.graph_steps += plan.graph
        self.microbatched_steps += plan.stages > 1
        self.tokens += tokens


class _Step:
    """One step of a link; a class, because a generator costs attention's host microseconds in every step."""

    __slots__ = ("_link", "_plan")

    def __init__(self, link: AttentionLink, plan: StepPlan) -> None:
        self._link, self._plan = link, plan

    def __enter__(self) -> StepPlan:
        self._link.begin(self._plan)
        return self._plan

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.end(self._plan, error)


class AttentionLink:
    """Steps and exchanges of one attention worker.

    ``control`` and ``connector`` are None on tensor-parallel followers, whose ``group`` then has rank 0 as its source.
    """

    def __init__(
        self,
        lane: int,
        units: Sequence[BoundUnit],
        group: GroupCoordinator,
        control: AttentionControl | None,
        connector: AFDConnector | None,
        lanes: int = 1,
    ) -> None:
        self.lane = lane
        self.lanes = lanes
        self.independent = False
        """Whether this lane is an engine of its own, whose steps no other lane takes part in."""

        self.drain_timeout_s = math.inf
        """From the launcher's stop on, how long steps are still made for the requests that run."""

        self._next_drain_check = 0.0
        self.counts = StepCounts()
        self.recent_exchange_s: deque[float] = deque(maxlen=RECENT)
        """Host time of the last exchanges, for the report that a bench reads."""

        self.tracing: StepTracing | None = None
        """On a lane's leader in a traced service."""

        self._units = [bound.unit for bound in units]
        self._group = group
        self._control = control
        self._connector = connector
        self._plan: StepPlan | None = None
        self._next_step = 0
        self.last_step: int | None = None
        self._issued: list[int] = []
        for bound in units:
            if not isinstance(bound.module, (RemoteMoERunner, RemoteDense)):
                raise TypeError(f"{bound.unit.name} is a {type(bound.module)}, which has no remote side")
            bound.module.bind(self._remote_call(bound.unit))

    def _remote_call(self, unit: RemoteUnit) -> RemoteCall:
        def call(hidden: torch.Tensor, router_logits: torch.Tensor | None) -> torch.Tensor:
            return self.exchange(unit, hidden, router_logits)

        return call

    def step(
        self, kind: StepKind, tokens: tuple[tuple[int, ...], ...], graph: bool = False
    ) -> AbstractContextManager[StepPlan]:
        """Announce a forward pass and check that it makes exactly the exchanges it announced."""
        return _Step(self, StepPlan(self._next_step, kind, tokens, graph))

    def begin(self, plan: StepPlan) -> None:
        """Announce ``plan``; what follows is its forward pass."""
        self._next_step = plan.step + 1
        self.last_step = plan.step
        self.check()
        self._check_drain()
        self._announce(plan)
        self._plan, self._issued = plan, [0] * plan.stages

    def end(self, plan: StepPlan, error: BaseException | None) -> None:
        """The forward pass of ``plan`` is over; raises what explains ``error`` better than itself, and what is not as
        announced.
        """
        self._plan = None
        if isinstance(error, Exception):
            cause = self._cause(error)
            if cause is not error:
                raise cause from error
        if error is not None:
            return
        due = [len(self._units)] * plan.stages
        if not plan.graph and self._issued != due:
            raise ProtocolError(f"step {plan.step} made {self._issued} exchanges by stage; {due} were due.")
        self.counts.note(plan, plan.lane_tokens(self.lane))

    def span(self, plan: StepPlan) -> AbstractContextManager[None]:
        """The span of a step of this lane, where it is traced."""
        return span_of(self.tracing, plan, self.counts, plan.lane_tokens(self.lane))

    def _announce(self, plan: StepPlan) -> None:
        if self._control is not None:
            self._control.announce(plan)

    def _cause(self, error: Exception) -> BaseException:
        """The error that explains why a step ended with ``error``."""
        return verdict(self._control, error)

    def check(self) -> None:
        """Raise what is known to have failed: a peer, or an exchange on the device. Costs microseconds, no GPU work."""
        if self._control is not None:
            self._control.check()
        if self._connector is not None:
            self._connector.check()

    def _check_drain(self) -> None:
        """Give up what still runs when a clean stop has taken its time: vLLM would leave its clients without a word."""
        if self._control is None or (now := time.monotonic()) < self._next_drain_check:
            return
        self._next_drain_check = now + DRAIN_CHECK_S
        if stopping_for() <= self.drain_timeout_s:
            return
        raise DrainTimeout(
            f"Requests were still running {self.drain_timeout_s:g} s after the stop began; they end with an error."
        )

    def exchange(
        self, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> torch.Tensor:
        """Send ``hidden`` [rows, hidden_size] to the FFN and return the unit's output of the same shape."""
        plan = self._plan
        if plan is None:
            raise ProtocolError(f"{unit.name} ran outside an announced step.")
        stage = dbo_current_ubatch_id() if plan.stages > 1 else 0
        position = self._issued[stage]
        if position >= len(self._units) or self._units[position].index != unit.index:
            raise ProtocolError(
                f"{unit.name} ran as exchange {position} of stage {stage} of step {plan.step}, out of order."
            )
        rows = plan.tokens[self.lane][stage]
        if hidden.shape[0] != rows:
            raise ProtocolError(f"{unit.name} has {hidden.shape[0]} rows; step {plan.step} announced {rows}.")
        self._issued[stage] += 1
        started = time.perf_counter()
        if self._connector is not None and rows:
            exchange = Exchange(plan.step, unit.index, stage)
            with RANGES.exchange(exchange, unit.name):
                output = self._cross(exchange, unit, hidden.contiguous(), router_logits)
        else:
            self._give_way()
            output = torch.empty_like(hidden)
        if self._group.world_size > 1:
            output = self._group.broadcast(output, 0)
        self.counts.exchanges += 1
        elapsed = time.perf_counter() - started
        self.counts.exchange_seconds += elapsed
        self.recent_exchange_s.append(elapsed)
        return output

    def _give_way(self) -> None:
        """Between the rows of a stage and the wait for their answer: the other stage's attention goes there.

        Every rank of a lane does so, since all enqueue the lane's collectives in one order.
        """
        if self._plan is not None and self._plan.stages > 1:
            dbo_yield()

    def _cross(
        self, exchange: Exchange, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> torch.Tensor:
        """One exchange of the leader's, on the connector of this moment."""
        assert self._connector is not None  # noqa: S101 - a leader has one
        return self._through(self._connector, exchange, unit, hidden, router_logits)

    def _through(
        self,
        connector: AFDConnector,
        exchange: Exchange,
        unit: RemoteUnit,
        hidden: torch.Tensor,
        router_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        connector.send_hidden(exchange, unit, hidden, router_logits)
        self._give_way()
        waiting = time.perf_counter()
        received = connector.recv_output(exchange, hidden.shape[0])
        self.counts.wait_seconds += time.perf_counter() - waiting
        # In stream order the next message of a stage comes after everything that reads this one.
        return received if connector.stream_ordered else received.clone()
