# SPDX-License-Identifier: Apache-2.0
"""Named ranges around steps and exchanges, for profilers: NVTX on a GPU, and torch's own in its traces.

Both roles name a step alike (``afd step 12 real``), which is how their traces are aligned. Eager steps have a range for
every (step, unit, stage); a replayed graph runs no Python, so it has its step's range alone. Off until vLLM's profiler
starts, or from the beginning with ``AFD_RANGES=1`` (for tools that attach from outside); off, they cost nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from afd_plugin.plan import Exchange, StepPlan

VARIABLE = "AFD_RANGES"
NOTHING: AbstractContextManager[None] = nullcontext()
"""One for all steps that are neither profiled nor traced."""


def step_name(plan: StepPlan) -> str:
    """The name of a step's range, the same in both roles."""
    return f"afd step {plan.step} {plan.kind.value}"


def exchange_name(exchange: Exchange, unit: str) -> str:
    """The name of an exchange's range, the same in both roles."""
    return f"afd step {exchange.step} {unit} stage {exchange.stage}"


class Ranges:
    """The ranges of one process; ``on`` from the start when asked for by the environment."""

    def __init__(self, on: bool | None = None) -> None:
        self._always = os.environ.get(VARIABLE) == "1" if on is None else on
        self._on = self._always

    @property
    def on(self) -> bool:
        """Whether ranges are written now."""
        return self._on

    def profiling(self, running: bool) -> None:
        """The profiler has started or stopped."""
        self._on = running or self._always

    def step(self, plan: StepPlan) -> AbstractContextManager[None]:
        """The range of a forward pass."""
        return _named(step_name(plan)) if self._on else NOTHING

    def exchange(self, exchange: Exchange, unit: str) -> AbstractContextManager[None]:
        """The range of one exchange: on attention from its request to its answer, on the FFN its computation."""
        return _named(exchange_name(exchange, unit)) if self._on else NOTHING


@contextmanager
def _named(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


RANGES = Ranges()
"""This process's: a profiler is the process's, too."""
