# SPDX-License-Identifier: Apache-2.0
"""Turns every call of a model into an announced step.

The announcer is the outermost callable in a runner's ``model`` attribute, outside vLLM's graph and microbatch
wrappers: real batches, dummy batches of an idle data-parallel rank, profiling, warm-up, capture and replay
all pass through it. A captured call exchanges nothing and is announced as a capture; a replayed one exchanges
without running any Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from torch import nn
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

from afd_plugin.plan import StepKind
from afd_plugin.v1.worker.attention_link import AttentionLink
from afd_plugin.v1.worker.ranges import RANGES


class GraphPhase(Enum):
    """What vLLM's graph wrapper is about to do with a call."""

    EAGER = "eager"
    CAPTURE = "capture"
    REPLAY = "replay"


def graph_phase(inner: Callable[..., Any], context: ForwardContext) -> GraphPhase:
    """What ``inner`` will do in ``context``: the rules of vLLM's two graph wrappers, read beforehand."""
    if context.cudagraph_runtime_mode is not CUDAGraphMode.FULL:
        return GraphPhase.EAGER
    if isinstance(inner, UBatchWrapper):
        if context.ubatch_slices is not None:
            captured = sum(part.num_tokens for part in context.ubatch_slices) in inner.cudagraphs
            return GraphPhase.REPLAY if captured else GraphPhase.CAPTURE
        descriptor = context.batch_descriptor
        if inner.cudagraph_wrapper is None or descriptor is None or descriptor.num_tokens in inner.cudagraphs:
            return GraphPhase.EAGER  # a size that was captured in two stages has no graph of one
        inner = inner.cudagraph_wrapper
    if not isinstance(inner, CUDAGraphWrapper):
        return GraphPhase.EAGER
    size = context.batch_descriptor
    entry = None if size is None else inner.concrete_cudagraph_entries.get(size)
    return GraphPhase.CAPTURE if entry is None or entry.cudagraph is None else GraphPhase.REPLAY


def step_kind(context: ForwardContext, phase: GraphPhase, dummy: bool) -> StepKind:
    """A forward pass without attention metadata, or from vLLM's dummy run, serves no request."""
    if phase is GraphPhase.CAPTURE:
        return StepKind.CAPTURE
    return StepKind.DUMMY if dummy or context.attn_metadata is None else StepKind.REAL


def alone(tokens: tuple[tuple[int, ...], ...], lane: int, lanes: int) -> tuple[tuple[int, ...], ...]:
    """The rows of a lane that is an engine of its own: no other lane has any in its steps."""
    own = tokens[0]
    return tuple(own if other == lane else (0,) * len(own) for other in range(lanes))


def lane_tokens(context: ForwardContext, rows: int, lanes: int = 1) -> tuple[tuple[int, ...], ...]:
    """Rows of every lane and stage in this step; vLLM has agreed on them across data-parallel ranks.

    A step in two stages is padded to the same size on every rank, and split alike.
    """
    if context.ubatch_slices is not None:
        return (tuple(int(part.num_tokens) for part in context.ubatch_slices),) * lanes
    if context.dp_metadata is None:
        return ((rows,),)
    return tuple((int(count),) for count in context.dp_metadata.num_tokens_across_dp_cpu.tolist())


class StepAnnouncer:
    """Calls ``inner`` within an announced step; everything else is the inner model's."""

    def __init__(self, inner: Callable[..., Any], model: nn.Module, link: AttentionLink) -> None:
        self.inner = inner
        self._model = model
        self._link = link
        self._dummy = False

    @contextmanager
    def without_requests(self) -> Iterator[None]:
        """The enclosed calls serve no request, whatever their attention metadata looks like."""
        before, self._dummy = self._dummy, True
        try:
            yield
        finally:
            self._dummy = before

    def unwrap(self) -> nn.Module:
        """The raw model below all wrappers."""
        return self._model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started, counts = time.perf_counter(), self._link.counts
        context = get_forward_context()
        if (source := kwargs.get("input_ids")) is None:
            source = kwargs["inputs_embeds"]
        link, rows = self._link, source.shape[0]
        if link.independent:
            tokens = alone(lane_tokens(context, rows), link.lane, link.lanes)
        else:
            tokens = lane_tokens(context, rows, link.lanes)
        phase = graph_phase(self.inner, context)
        kind = step_kind(context, phase, self._dummy)
        graph = phase is GraphPhase.REPLAY
        with self._link.step(kind, tokens, graph=graph) as plan:
            counts.announce_seconds += time.perf_counter() - started
            if link.tracing is None and not RANGES.on:
                return self.inner(*args, **kwargs)
            with RANGES.step(plan), link.span(plan):
                return self.inner(*args, **kwargs)
