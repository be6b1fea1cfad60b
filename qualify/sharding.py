# SPDX-License-Identifier: Apache-2.0
"""Which shard of a suite runs which case: divided by time, so that no shard passes the limit of a session.

Every part derives the same division from the list of cases alone: the gate from the tracked list, pytest's plugin from
what it collected. Where the two differ, the divisions do, and the gate names the cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

USUAL_S = 18.0
"""What a case is taken to need; a function's cases stay together, since most share a service."""

LONG_S: Mapping[str, float] = {
    "tests/e2e/test_chaos.py::test_an_idle_service_costs_no_processor_and_answers_afterwards": 1890.0,
    "tests/e2e/test_chaos.py::test_every_fault_at_every_moment_is_an_error_within_the_bound_and_leaves_nothing": 40.0,
    "tests/e2e/test_chaos.py::test_twenty_lives_of_a_service_leave_no_process_port_or_file": 1020.0,
    "tests/e2e/test_control_fuzz.py::test_ten_minutes_of_mutated_frames_crash_nothing_and_grow_nothing": 630.0,
    "tests/e2e/test_restart.py::test_real_processes_struck_from_outside_come_back": 130.0,
}
"""Seconds of one case on a slow host of two cores, beside an idle service, as the mean of its function's; these have
services of their own case by case, and are split.
"""

WAITING = frozenset(
    {"tests/e2e/test_chaos.py::test_an_idle_service_costs_no_processor_and_answers_afterwards"}
)
"""Functions that take time and next to no processor; what they measure is that of their own processes."""

Cases = Mapping[str, int]
Division = tuple[Mapping[str, tuple[int, ...]], ...]


def divided(cases: Cases, shards: int) -> Division:
    """Each shard's positions of each function's cases: the longest first, each to the shard with the least so far."""
    groups: list[tuple[float, str, tuple[int, ...]]] = []
    for name, count in cases.items():
        if name in LONG_S:
            groups += [(LONG_S[name], name, (position,)) for position in range(count)]
        else:
            groups.append((USUAL_S * count, name, tuple(range(count))))
    spent = [0.0] * shards
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shards)]
    for seconds, name, positions in sorted(groups, key=lambda group: (-group[0], *group[1:])):
        least = spent.index(min(spent))
        spent[least] += seconds
        parts[least][name] = parts[least].get(name, ()) + positions
    return tuple(parts)


def seconds(part: Mapping[str, tuple[int, ...]]) -> float:
    """What a shard is expected to take."""
    return sum(LONG_S.get(name, USUAL_S) * len(positions) for name, positions in part.items())


def waits(cases: Cases, shard: str) -> bool:
    """Whether a shard does nothing but wait, so that the others can run beside it."""
    return bool(shard) and WAITING.issuperset(of_shard(cases, shard))


def of_shard(cases: Cases, shard: str) -> Cases:
    """The part of a list that a shard, `2/6`, must run; all of it for an empty name."""
    if not shard:
        return cases
    return {name: len(positions) for name, positions in _part(cases, shard).items()}


def chosen(collected: Iterable[str], shard: str) -> frozenset[str]:
    """Those of the collected node ids that a shard runs; a case's position is that of its id among its function's."""
    if not shard:
        return frozenset(collected)
    by_function: dict[str, list[str]] = defaultdict(list)
    for case in collected:
        by_function[case.partition("[")[0]].append(case)
    part = _part({name: len(found) for name, found in by_function.items()}, shard)
    return frozenset(
        sorted(by_function[name])[position] for name, positions in part.items() for position in positions
    )


def _part(cases: Cases, shard: str) -> Mapping[str, tuple[int, ...]]:
    number, _, shards = shard.partition("/")
    return divided(cases, int(shards))[int(number) - 1]
