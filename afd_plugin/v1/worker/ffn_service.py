# SPDX-License-Identifier: Apache-2.0
"""The FFN end of a running service: one loop that computes what attention announces.

It runs on the worker's main thread inside one RPC, so an exception travels to the host by vLLM's own executor. The
group's leader receives announcements and rows; its tensor-parallel followers get both by vLLM's broadcasts, and the
native runner reduces the result inside the FFN's own world. Where several groups share one tensor-parallel world
(:meth:`Topology.ffn_world`), each leader broadcasts the rows of its own lanes and returns their part of the output.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import DPMetadata, create_forward_context, override_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from afd_plugin.connectors.base import AFDConnector
from afd_plugin.connectors.packed import LOGIT_DTYPES
from afd_plugin.control import Drain, Event, FFNControl, Profile, Shutdown
from afd_plugin.errors import ProtocolError
from afd_plugin.model.scan import BoundUnit
from afd_plugin.plan import Exchange, RemoteUnit, StepKind, StepPlan, schedule
from afd_plugin.topology import Topology
from afd_plugin.v1.worker.fingerprints import model_dtype
from afd_plugin.v1.worker.ranges import RANGES
from afd_plugin.v1.worker.role_report import RECENT
from afd_plugin.v1.worker.step_tracing import StepTracing, span_of

Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Hidden states [rows, hidden_size], and router logits [rows, width] where attention computes them."""

KEEP_ALIVE_S = 60.0
"""How often an idle leader wakes its followers, so that no broadcast of vLLM's runs into its own timeout."""


@dataclass
class FFNCounts:
    """What the FFN did; ``compute_seconds`` is host time inside the units, without waiting or sending."""

    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys((kind.value for kind in StepKind), 0))
    tokens: int = 0
    exchanges: int = 0
    compute_seconds: float = 0.0


class FFNService:
    """Serves one FFN rank until its lanes shut it down.

    ``control`` and ``connector`` are None on tensor-parallel followers. ``profile`` is the worker's own method.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        topology: Topology,
        group: int,
        units: Sequence[BoundUnit],
        tensor_parallel: GroupCoordinator,
        control: FFNControl | None,
        connector: AFDConnector | None,
        profile: Callable[[bool, str], None],
    ) -> None:
        self.counts = FFNCounts()
        self.recent_compute_s: deque[float] = deque(maxlen=RECENT)
        """Host time inside the units in the last exchanges, for the report that a bench reads."""

        self.last_step: int | None = None
        self.tracing: StepTracing | None = None
        """On a group's leader in a traced service."""

        self.check_asked: Callable[[], None] = lambda: None
        """Raises when this process has been asked to end; called between steps."""

        self._vllm_config = vllm_config
        self._topology = topology
        self._group = group
        self._lanes = topology.lanes_of(group)
        flat = tensor_parallel.world_size > topology.ffn_tp
        self._sharing = range(topology.ffn_dp) if flat else range(group, group + 1)
        self._units = [bound.unit for bound in units]
        self._modules: dict[int, nn.Module] = {bound.unit.index: bound.module for bound in units}
        self._tensor_parallel = tensor_parallel
        self._control = control
        self._connector = connector
        self._profile = profile

    def serve(self) -> None:
        """Compute steps until a Shutdown arrives; raises when a peer is lost or a step is not as announced."""
        with torch.inference_mode():
            while True:
                self.check_asked()
                event = self._next_event()
                if isinstance(event, StepPlan):
                    self._run(event)
                elif isinstance(event, Profile):
                    self._profile(event.start, event.prefix)
                elif isinstance(event, Shutdown):
                    return
                elif event is not None and not isinstance(event, Drain):
                    raise ProtocolError(
                        f"the control plane delivered {event!r}, which the FFN does not know."
                    )

    def _next_event(self) -> Event | None:
        first = self._group == self._sharing[0]
        wait = self._event_wait_s()
        event = self._control.next_event(wait) if self._control is not None and first else None
        if self._tensor_parallel.world_size > 1:
            event = self._tensor_parallel.broadcast_object(event, 0)
            if self._control is not None and not first:
                self._expect(self._control, event)
        return event

    def _event_wait_s(self) -> float:
        """How long at most a wait for the next event may take."""
        return KEEP_ALIVE_S

    def _expect(self, control: FFNControl, event: Event | None) -> None:
        """Wait until the lanes of a further group have announced what the first group's leader passed on."""
        if not isinstance(event, (StepPlan, Shutdown)):
            return
        own: Event | None = None
        deadline = time.monotonic() + KEEP_ALIVE_S
        while not isinstance(own, (StepPlan, Shutdown)) and time.monotonic() < deadline:
            own = control.next_event(KEEP_ALIVE_S)
        if isinstance(own, StepPlan) and isinstance(event, StepPlan):
            same = own._replace(kind=event.kind) == event
        else:
            same = isinstance(own, Shutdown) and isinstance(event, Shutdown)
        if not same:
            raise ProtocolError(f"the lanes of FFN group {self._group} announced {own}; {event} was due.")

    def prepare(self) -> None:
        """Get ready to serve before the roles meet; nothing to do where every step is computed as it comes."""

    def _run(self, plan: StepPlan) -> None:
        self.last_step = plan.step
        plan.check(self._topology.attention_dp, self._vllm_config.scheduler_config.max_num_batched_tokens)
        rows = [plan.group_rows(self._lanes, stage) for stage in range(plan.stages)]
        tokens = sum(map(sum, rows))
        with RANGES.step(plan), span_of(self.tracing, plan, self.counts, tokens):
            self._execute(plan, rows)
        self.counts.steps[plan.kind.value] += 1
        self.counts.tokens += tokens

    def _execute(self, plan: StepPlan, rows: Sequence[Sequence[int]]) -> None:
        """Receive, compute and answer every exchange of ``plan``; ``rows[stage][lane]`` are the group's own."""
        contexts = [self._forward_context(plan, stage) for stage in range(plan.stages)]
        for exchange in schedule(plan, self._units):
            if not plan.stage_tokens(exchange.stage):
                continue  # nobody sends a message without rows
            unit = self._units[exchange.unit]
            hidden, logits = self._receive(plan, exchange, unit, rows[exchange.stage])
            started = time.perf_counter()
            with contexts[exchange.stage](), RANGES.exchange(exchange, unit.name):
                output = self._compute(unit, hidden, logits)
            elapsed = time.perf_counter() - started
            self.counts.compute_seconds += elapsed
            self.recent_compute_s.append(elapsed)
            if self._connector is not None:
                first = sum(
                    plan.group_tokens(self._topology.lanes_of(group), exchange.stage)
                    for group in self._sharing
                    if group < self._group
                )
                own = output[first : first + sum(rows[exchange.stage])]
                self._connector.send_output(exchange, rows[exchange.stage], own)
            self.counts.exchanges += 1

    def _compute(self, unit: RemoteUnit, hidden: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        module = self._modules[unit.index]
        if isinstance(module, MoERunner):
            # Where the runner owns its gate, vLLM's blocks pass the hidden states in the place of the logits.
            output: torch.Tensor = module(hidden, hidden if logits is None else logits)
        else:
            output = module(hidden)
        return output.contiguous()

    def _receive(self, plan: StepPlan, exchange: Exchange, unit: RemoteUnit, rows: Sequence[int]) -> Rows:
        """The world's rows on every rank: from the data plane on a group's leader, by broadcast on all others."""
        received: Rows | None = None
        if self._connector is not None:
            received = self._connector.recv_hidden(exchange, unit, rows)
        if self._tensor_parallel.world_size == 1:
            assert received is not None  # noqa: S101 - the only rank of a world is a leader
            return received
        parts = []
        for group in self._sharing:
            count = plan.group_tokens(self._topology.lanes_of(group), exchange.stage)
            if count:
                parts.append(self._shared(group, unit, count, received if group == self._group else None))
        if len(parts) == 1:
            return parts[0]
        logits = [part[1] for part in parts if part[1] is not None]
        return torch.cat([part[0] for part in parts]), torch.cat(logits) if logits else None

    def _shared(self, group: int, unit: RemoteUnit, rows: int, received: Rows | None) -> Rows:
        """What the leader of ``group`` has ``received``, on every rank of the world. Sizes are known from the plan."""
        world, width = self._tensor_parallel, self._vllm_config.model_config.get_hidden_size()
        leader = (group - self._sharing[0]) * self._topology.ffn_tp
        hidden, logits = received or (torch.empty(rows, width, dtype=model_dtype(self._vllm_config)), None)
        world.broadcast(hidden, leader)
        if not unit.router_logits:
            return hidden, None
        # Only the leader has seen in which type attention's gate answered.
        code = torch.tensor([LOGIT_DTYPES.index(logits.dtype) if logits is not None else 0])
        world.broadcast(code, leader)
        if logits is None:
            logits = torch.empty(rows, unit.router_logits, dtype=LOGIT_DTYPES[int(code)])
        world.broadcast(logits, leader)
        return hidden, logits

    def _forward_context(self, plan: StepPlan, stage: int) -> Callable[[], AbstractContextManager[None]]:
        """vLLM's forward context of one stage; rows of other FFN groups come from the plan, not a collective."""
        counts = [
            plan.group_tokens(self._topology.lanes_of(group), stage) for group in range(self._topology.ffn_dp)
        ]
        own = plan.group_tokens(self._lanes, stage)
        metadata = None
        if self._vllm_config.parallel_config.data_parallel_size > 1:
            metadata = DPMetadata.make(
                self._vllm_config.parallel_config, own, torch.tensor(counts, dtype=torch.int32)
            )
        context = create_forward_context(None, self._vllm_config, dp_metadata=metadata)
        return lambda: override_forward_context(context)
