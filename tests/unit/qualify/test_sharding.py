# SPDX-License-Identifier: Apache-2.0
"""Shards of a suite: disjoint, whole, within the limit, and the same for the gate and for pytest."""

from __future__ import annotations

import pytest

from qualify import expected, sharding
from qualify.chain import SHARD_LIMIT_S, SHARDS
from qualify.sharding import LONG_S, USUAL_S

LONG = next(iter(name for name, seconds in LONG_S.items() if seconds < 100))
FULL = expected.listed("e2e_all")


def ids(cases: dict[str, int]) -> list[str]:
    """Node ids as pytest would collect them."""
    return [f"{name}[{n}]" if count > 1 else name for name, count in cases.items() for n in range(count)]


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_every_case_is_in_exactly_one_shard_and_the_gate_expects_what_pytest_keeps(shards: int) -> None:
    cases = {f"tests/e2e/test_{n}.py::test_it": 1 + n for n in range(9)} | {LONG: 25}
    kept: list[str] = []
    for number in range(1, shards + 1):
        mine = sharding.chosen(reversed(ids(cases)), f"{number}/{shards}")
        assert expected.by_function(mine) == sharding.of_shard(cases, f"{number}/{shards}")
        kept += mine
    assert sorted(kept) == sorted(ids(cases))


def test_a_function_stays_together_unless_it_is_known_to_be_long() -> None:
    cases = {"t.py::test_shared": 12, LONG: 30}
    parts = sharding.divided(cases, 3)
    assert [part.get("t.py::test_shared") for part in parts].count(tuple(range(12))) == 1
    assert all(LONG in part for part in parts)


def test_without_a_shard_everything_runs() -> None:
    assert sharding.of_shard({"a": 2}, "") == {"a": 2}
    assert sharding.chosen(["a[1]", "a[2]"], "") == {"a[1]", "a[2]"}


def test_no_shard_of_the_full_scope_is_expected_to_pass_its_limit_and_no_long_case_is_unknown() -> None:
    parts = sharding.divided(FULL, SHARDS)
    assert max(map(sharding.seconds, parts)) <= 0.9 * SHARD_LIMIT_S
    assert sum(map(sharding.seconds, parts)) >= USUAL_S * sum(FULL.values())
    assert set(LONG_S) <= set(FULL), "a function that was renamed has lost its time"


def test_what_is_planned_is_no_less_than_the_slowest_run_that_was_seen() -> None:
    """2073 s beside the idle service, of twenty lives, 23 moments of a fault and eight others."""
    lives, moment = (
        next(name for name in LONG_S if word in name) for word in ("twenty_lives", "every_fault_at_every")
    )
    others = {f"t.py::test_{n}": (0,) for n in range(8)}
    assert sharding.seconds({lives: (0,), moment: tuple(range(23)), **others}) >= 2073


def test_of_the_full_scope_one_shard_only_waits() -> None:
    assert [n for n in range(1, SHARDS + 1) if sharding.waits(FULL, f"{n}/{SHARDS}")] == [1]
    assert set(FULL) >= sharding.WAITING
    assert not sharding.waits(FULL, ""), "an undivided suite does everything"
