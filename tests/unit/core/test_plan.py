# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin.plan import (
    HEADER_BYTES,
    LOGIT_BYTES,
    Exchange,
    MessageLayout,
    RemoteUnit,
    StepKind,
    StepPlan,
    UnitKind,
    schedule,
)

UNITS = tuple(RemoteUnit(index, f"layers.{index}", UnitKind.EXPERTS) for index in range(3))


def plan(*tokens: tuple[int, ...]) -> StepPlan:
    return StepPlan(7, StepKind.REAL, tokens)


def test_the_schedule_runs_unit_by_unit_and_stage_by_stage() -> None:
    order = list(schedule(plan((4, 3)), UNITS))
    assert order == [Exchange(7, unit, stage) for unit in range(3) for stage in range(2)]


def test_a_resumed_plan_leaves_out_what_was_answered() -> None:
    whole = list(schedule(plan((4,)), UNITS))
    assert list(schedule(plan((4,))._replace(resume=2), UNITS)) == whole[2:]
    with pytest.raises(ValueError, match="resumes at exchange 3 of 3"):
        list(schedule(plan((4,))._replace(resume=3), UNITS))
    for wrong in (plan((4, 3))._replace(resume=1), plan((4,))._replace(resume=1, graph=True)):
        with pytest.raises(ValueError, match="not layer by layer"):
            wrong.check(lanes=1, max_tokens=8)


def test_equal_sums_are_different_plans() -> None:
    assert plan((4,), (4,)) != plan((7,), (1,))
    assert plan((4,), (4,)).group_tokens((0, 1), 0) == plan((7,), (1,)).group_tokens((0, 1), 0)


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (((1,),), "names 1 lanes"),
        (((1,), (1, 1)), "uneven"),
        (((1, 1, 1), (1, 1, 1)), "uneven or unknown"),
        (((-1,), (1,)), "lane 0 announces"),
        (((5, 4), (0, 0)), "lane 0 announces"),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error(tokens: tuple[tuple[int, ...], ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan(*tokens).check(lanes=2, max_tokens=8)


def test_zero_and_full_lanes_fit() -> None:
    plan((0,), (8,)).check(lanes=2, max_tokens=8)


@settings(deadline=None)
@given(
    rows=st.integers(0, 4096),
    hidden=st.integers(1, 8192),
    itemsize=st.sampled_from([2, 4]),
    logits=st.integers(0, 512),
)
def test_a_message_holds_its_parts_without_overlap(
    rows: int, hidden: int, itemsize: int, logits: int
) -> None:
    layout = MessageLayout(hidden, itemsize, logits)
    hidden_end = HEADER_BYTES + rows * hidden * itemsize
    assert hidden_end <= layout.logits_offset(rows)
    assert layout.size(rows) == layout.logits_offset(rows) + rows * logits * LOGIT_BYTES
    if logits:
        assert layout.logits_offset(rows) % 64 == 0
    assert layout.size(rows) <= layout.size(rows + 1)
