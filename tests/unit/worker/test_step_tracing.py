# SPDX-License-Identifier: Apache-2.0
"""What a worker's step puts into its span; without tracing a step costs one comparison more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from afd_plugin.plan import StepKind, StepPlan
from afd_plugin.v1.worker.step_tracing import StepTracing, span_of, step_tracing

COUNTS = object()


class Recorder:
    """Stands in for the exporter's side; keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int, Mapping[str, Any], bool]] = []

    @contextmanager
    def step(
        self,
        epoch: int,
        step: int,
        owner: int,
        counts: object,
        attributes: Mapping[str, Any],
        *,
        resumed: bool,
    ) -> Iterator[None]:
        assert counts is COUNTS
        self.steps.append((epoch, step, owner, attributes, resumed))
        yield


def run(plan: StepPlan, epochs: list[int], independent: bool = False) -> tuple[int, int, int, Any, bool]:
    recorder = Recorder()
    tracing = StepTracing(recorder, epochs.pop, independent)  # type: ignore[arg-type]
    with span_of(tracing, plan, COUNTS, 5):
        pass
    (found,) = recorder.steps
    return found


def test_a_span_has_the_plans_number_kind_and_stages_and_the_epoch_of_its_moment() -> None:
    plan = StepPlan(7, StepKind.DUMMY, ((3, 2),), graph=True)
    assert run(plan, [9]) == (
        9,
        7,
        0,
        {"afd.kind": "dummy", "afd.tokens": 5, "afd.stages": 2, "afd.graph": True},
        False,
    )


def test_a_step_that_is_entered_in_the_middle_is_told_apart() -> None:
    assert run(StepPlan(7, StepKind.REAL, ((3,),), resume=2), [9])[4]


@pytest.mark.parametrize(
    ("tokens", "independent", "owner"),
    [
        (((0,), (4,)), True, 1),
        (((4,), (0,)), True, 0),
        (((0,), (0,)), True, 0),
        (((0,), (4,)), False, 0),
    ],
)
def test_the_steps_of_engines_of_their_own_are_told_apart_by_their_lane(
    tokens: tuple[tuple[int, ...], ...], independent: bool, owner: int
) -> None:
    assert run(StepPlan(7, StepKind.REAL, tokens), [9], independent)[2] == owner


def test_nothing_surrounds_a_step_where_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    tracing = step_tracing("ffn", "0-0", lambda: 1, first=False, independent=False)
    assert tracing is None
    assert isinstance(span_of(tracing, StepPlan(0, StepKind.REAL, ((1,),)), COUNTS, 1), nullcontext)
