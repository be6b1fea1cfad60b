# SPDX-License-Identifier: Apache-2.0
"""Ties a worker's steps to its spans (:mod:`afd_plugin.observability.spans`); exists only in a traced service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from afd_plugin.observability.tracing import step_spans
from afd_plugin.plan import StepPlan
from afd_plugin.v1.worker.ranges import NOTHING

if TYPE_CHECKING:
    from afd_plugin.observability.spans import StepSpans


class StepTracing:
    """The spans of one leader's steps.

    Args:
        epoch: The present life of the service; it changes when the FFN has been started again.
        independent: Whether lanes are engines of their own, which count their steps each by itself.
    """

    def __init__(self, spans: StepSpans, epoch: Callable[[], int], independent: bool) -> None:
        self._spans = spans
        self._epoch = epoch
        self._independent = independent

    def step(self, plan: StepPlan, counts: object, tokens: int) -> AbstractContextManager[None]:
        """The span of the enclosed step, in which this worker has ``tokens`` rows and adds to ``counts``."""
        # a step of an engine of its own has rows in that engine's lane alone
        owner = (
            next((lane for lane, rows in enumerate(plan.tokens) if any(rows)), 0) if self._independent else 0
        )
        attributes = {
            "afd.kind": plan.kind.value,
            "afd.tokens": tokens,
            "afd.stages": plan.stages,
            "afd.graph": plan.graph,
        }
        return self._spans.step(self._epoch(), plan.step, owner, counts, attributes, resumed=plan.resume > 0)


def span_of(
    tracing: StepTracing | None, plan: StepPlan, counts: object, tokens: int
) -> AbstractContextManager[None]:
    """The step's span, or nothing where nothing is traced."""
    return NOTHING if tracing is None else tracing.step(plan, counts, tokens)


def step_tracing(
    role: str, rank: str, epoch: Callable[[], int], *, first: bool, independent: bool
) -> StepTracing | None:
    """The step spans of this process; None where nothing is traced. ``first`` as in :func:`step_spans`."""
    spans = step_spans(role, rank, first=first)
    return None if spans is None else StepTracing(spans, epoch, independent)
