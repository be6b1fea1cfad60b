# SPDX-License-Identifier: Apache-2.0
"""Turns every call of a model into an announced step.

The announcer is the outermost callable in a runner's ``model`` attribute, outside vLLM's graph and microbatch wrappers:
real batches, dummy batches of an idle data-parallel rank, profiling and warm-up all pass through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.forward_context import ForwardContext, get_forward_context

from afd_plugin.plan import StepKind
from afd_plugin.v1.worker.attention_link import AttentionLink


def step_kind(context: ForwardContext) -> StepKind:
    """A forward pass without attention metadata serves no request."""
    return StepKind.DUMMY if context.attn_metadata is None else StepKind.REAL


def lane_tokens(context: ForwardContext, rows: int) -> tuple[tuple[int, ...], ...]:
    """Rows of every lane in this step, one stage each; vLLM has agreed on them across data-parallel ranks."""
    if context.dp_metadata is None:
        return ((rows,),)
    return tuple((int(count),) for count in context.dp_metadata.num_tokens_across_dp_cpu.tolist())


class StepAnnouncer:
    """Calls ``inner`` within an announced step; everything else is the inner model's."""

    def __init__(self, inner: Callable[..., Any], model: nn.Module, link: AttentionLink) -> None:
        self.inner = inner
        self._model = model
        self._link = link

    def unwrap(self) -> nn.Module:
        """The raw model below all wrappers."""
        return self._model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        source = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        tokens = lane_tokens(context, int(source.shape[0]))
        with self._link.step(step_kind(context), tokens):
            return self.inner(*args, **kwargs)
