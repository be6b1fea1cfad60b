# SPDX-License-Identifier: Apache-2.0
"""The FFN's service on CUDA: steps are enqueued, whole steps replay from CUDA graphs, the host runs two steps
ahead.

A graph holds one whole step, for all units and stages: wait, compute from the arena, answer. Its key is the
full layout of the step, ``tokens[lane][stage]`` of every lane of the topology, never a sum. A graph is
captured when attention announces that it captures the same layout; that call exchanges nothing on either
side. A layout without a graph runs eagerly, which is the same protocol, so either side may replay while the
other does not. Both are counted here and on the device, where the captured graph itself increments the
counter.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import graph_capture
from vllm.logger import init_logger
from vllm.utils.torch_utils import current_stream
from vllm.v1.worker.workspace import lock_workspace

from afd_plugin.control import Event
from afd_plugin.errors import AFDError
from afd_plugin.plan import Exchange, RemoteUnit, StepKind, StepPlan, schedule
from afd_plugin.v1.worker.ffn_service import FFNCounts, FFNService
from afd_plugin.v1.worker.fingerprints import graph_mode, model_dtype

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

logger = init_logger(__name__)

RUN_AHEAD_STEPS = 2
"""Steps that may be enqueued and unfinished: enough to hide the host, few enough to fail soon after a peer
did.
"""

FAULT_CHECK_S = 1.0
"""How often the connector is asked for a fault while a step is unfinished and nothing is announced."""

Layout = tuple[tuple[int, ...], ...]


@dataclass
class GraphCounts(FFNCounts):
    """Steps by how they ran. ``uncaptured`` are eager steps that attention replayed: a layout without a graph
    here.
    """

    eager: int = 0
    captures: int = 0
    replays: int = 0
    uncaptured: int = 0


class GraphedFFNService(FFNService):
    """Serves one FFN rank on a GPU."""

    counts: GraphCounts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = GraphCounts()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._graphs: dict[Layout, torch.cuda.CUDAGraph] = {}
        self._pool: _POOL_HANDLE | None = None
        self._in_flight: deque[torch.cuda.Event] = deque()
        self._broadcast_buffers: dict[tuple[int, int], torch.Tensor] = {}

    def prepare(self) -> None:
        """Compile kernels and size the workspace on this process's own data, so that no step of a peer pays
        for it.

        The largest step comes first: vLLM's workspace must not grow under a captured graph, and is locked
        afterwards.
        """
        with set_current_vllm_config(self._vllm_config), torch.inference_mode():
            current_stream()  # vLLM's own stream, which is not the default one, from now on
            limit = self._vllm_config.scheduler_config.max_num_batched_tokens
            lanes = len(self._lanes)
            self._compute_locally(self._uniform(limit), every_unit=True)
            for tokens in warm_up_sizes(
                limit, self._vllm_config.compilation_config.cudagraph_capture_sizes or ()
            ):
                self._compute_locally(self._uniform(tokens), every_unit=False)
            torch.cuda.synchronize(self._device)
            lock_workspace()
            torch.cuda.empty_cache()
        logger.info("AFD: FFN warmed up for up to %d rows of %d lanes.", limit, lanes)

    def serve(self) -> None:
        try:
            with set_current_vllm_config(self._vllm_config):
                super().serve()
            torch.cuda.synchronize(self._device)
        finally:
            self._graphs.clear()

    # ------------------------------------------------------------------ steps

    def _event_wait_s(self) -> float:
        busy = bool(self._in_flight) and not self._in_flight[-1].query()
        return FAULT_CHECK_S if busy else super()._event_wait_s()

    def _next_event(self) -> Event | None:
        """As the base's; what a kernel finds wrong while nothing is announced is raised now, not at the next step."""
        event = super()._next_event()
        if event is None and self._connector is not None:
            self._connector.check()
        return event

    def _execute(self, plan: StepPlan, rows: Sequence[Sequence[int]]) -> None:
        if self._connector is not None:
            self._connector.check()
        if plan.kind is StepKind.CAPTURE:
            self._capture(plan, rows)
            return
        while len(self._in_flight) >= RUN_AHEAD_STEPS:
            self._in_flight.popleft().synchronize()
        graph = self._graphs.get(plan.tokens)
        if graph is not None:
            graph.replay()
            self.counts.replays += 1
            self.counts.exchanges += len(self._units) * plan.stages
        else:
            super()._execute(plan, rows)
            self.counts.eager += 1
            self.counts.uncaptured += plan.graph
        done = torch.cuda.Event()
        done.record()
        self._in_flight.append(done)

    def _capture(self, plan: StepPlan, rows: Sequence[Sequence[int]]) -> None:
        """Record the step that attention is capturing; a layout is captured once."""
        if plan.tokens in self._graphs or graph_mode(self._vllm_config).name == "NONE":
            return
        self._compute_locally(plan, every_unit=True)
        torch.cuda.synchronize(self._device)
        exchanges = self.counts.exchanges
        graph = torch.cuda.CUDAGraph()
        with (
            _without_collection(),
            graph_capture(device=self._device),
            # evaluated within graph_capture, which makes a stream of its own current
            torch.cuda.graph(graph, pool=self._graph_pool(), stream=current_stream()),
        ):
            super()._execute(plan, rows)
        self.counts.exchanges = exchanges
        self.counts.captures += 1
        self._graphs[plan.tokens] = graph

    def _graph_pool(self) -> _POOL_HANDLE:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _compute_locally(self, plan: StepPlan, every_unit: bool) -> None:
        """Compute ``plan`` on zeros without any exchange; ``every_unit`` or the first of each kind."""
        first = {unit.kind: unit.index for unit in reversed(self._units)}
        hidden_size, dtype = self._vllm_config.model_config.get_hidden_size(), model_dtype(self._vllm_config)
        for exchange in schedule(plan, self._units):
            unit = self._units[exchange.unit]
            total = plan.group_tokens(self._lanes, exchange.stage)
            if not total or not (every_unit or first[unit.kind] == unit.index):
                continue
            hidden = torch.zeros(total, hidden_size, dtype=dtype, device=self._device)
            logits = None
            if unit.router_logits:
                logits = torch.zeros(
                    total, unit.router_logits, dtype=self._logits_dtype(unit), device=self._device
                )
            with self._forward_context(plan, exchange.stage)():
                self._compute(unit, hidden, logits)

    def _logits_dtype(self, unit: RemoteUnit) -> torch.dtype:
        """The agreed type; before the roles have met, the model's own serves to warm up."""
        if self._connector is not None:
            try:
                return self._connector.router_dtype(unit)
            except AFDError:
                pass
        return model_dtype(self._vllm_config)

    def _uniform(self, tokens: int) -> StepPlan:
        """A step in which every lane brings ``tokens`` rows in one stage; never announced by anybody."""
        return StepPlan(0, StepKind.DUMMY, ((tokens,),) * self._topology.attention_dp)

    # ------------------------------------------------------------------ tensor-parallel followers

    def _receive(
        self, plan: StepPlan, exchange: Exchange, unit: RemoteUnit, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in the base, but by device broadcasts alone, whose sizes every rank knows from the plan."""
        if self._tensor_parallel.world_size == 1:
            if self._connector is None:
                raise RuntimeError("an FFN rank without a connector and without a world")
            return self._connector.recv_hidden(exchange, unit, rows)
        total = sum(rows)
        if self._connector is not None:
            hidden, logits = self._connector.recv_hidden(exchange, unit, rows)
        else:
            hidden_size = self._vllm_config.model_config.get_hidden_size()
            hidden = self._buffer(exchange.stage, 0, total, hidden_size, model_dtype(self._vllm_config))
            logits = None
            if unit.router_logits:
                logits = self._buffer(exchange.stage, 1, total, unit.router_logits, self._logits_dtype(unit))
        self._tensor_parallel.broadcast(hidden, 0)
        if logits is not None:
            self._tensor_parallel.broadcast(logits, 0)
        return hidden, logits

    def _buffer(self, stage: int, part: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A follower's landing place: one per stage and part, as large as a step can be, at a fixed address."""
        key = (stage, part)
        limit = self._vllm_config.scheduler_config.max_num_batched_tokens * len(self._lanes)
        held = self._broadcast_buffers.get(key)
        if held is None:
            held = torch.empty(limit * width * 4, dtype=torch.uint8, device=self._device)
            self._broadcast_buffers[key] = held
        return held[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


def warm_up_sizes(limit: int, captured: Sequence[int]) -> tuple[int, ...]:
    """Row counts worth compiling for, largest first: the captured ones and powers of two, since kernels
    choose their tiles by ranges of rows.
    """
    powers = [1 << exponent for exponent in range(limit.bit_length())]
    return tuple(sorted({size for size in (*powers, *captured) if 0 < size <= limit}, reverse=True))


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection while a graph is captured: a finalised kernel would unload its module and spoil
    it.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
