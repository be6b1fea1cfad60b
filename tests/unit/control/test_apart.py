# SPDX-License-Identifier: Apache-2.0
"""Processes of one role that share no vLLM world: attention engines of their own, shards of the experts."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from afd_plugin.control import Profile, Shutdown
from afd_plugin.control.independent import IndependentMerger
from afd_plugin.control.messages import Step
from afd_plugin.control.statistics import Statistics
from afd_plugin.errors import PeerFailure, ProtocolError
from afd_plugin.plan import StepKind
from afd_plugin.topology import Topology
from tests.unit.control.harness import PATIENCE_S, Party, failure_of, plan, serving

TWO_ENGINES = Topology(attention_dp=2, independent_lanes=True)
TWO_SHARDS = Topology(ffn_shards=2)


def merger(lanes: int = 2) -> IndependentMerger:
    return IndependentMerger(5, range(lanes), lanes, 64, Statistics())


def step(lane: int, number: int, rows: int = 3, lanes: int = 2) -> Step:
    return Step.of(5, plan(number, *(rows if other == lane else 0 for other in range(lanes))))


def test_a_step_of_one_engine_waits_for_no_other() -> None:
    merged = merger()
    merged.push(1, step(1, 0))
    assert merged.next() == plan(0, 0, 3)
    assert merged.next() is None


def test_engines_take_turns_and_number_their_steps_by_themselves() -> None:
    merged = merger()
    for number in range(3):
        merged.push(0, step(0, number))
    for number in range(2):
        merged.push(1, step(1, number, rows=7))
    seen = [merged.next() for _ in range(5)]
    assert seen == [plan(0, 3, 0), plan(0, 0, 7), plan(1, 3, 0), plan(1, 0, 7), plan(2, 3, 0)]


def test_an_engine_may_end_while_another_goes_on() -> None:
    merged = merger()
    merged.push(0, Shutdown(5))
    assert merged.next() is None
    merged.push(1, step(1, 0))
    assert merged.next() == plan(0, 0, 3)
    merged.push(1, Shutdown(5))
    assert merged.next() == Shutdown(5)


def test_rows_of_another_engine_are_an_error() -> None:
    merged = merger()
    merged.push(0, Step.of(5, plan(0, 3, 4)))
    with pytest.raises(ProtocolError, match="with rows of lane 1"):
        merged.next()


def test_a_profile_of_any_engine_is_delivered_once() -> None:
    merged = merger()
    merged.push(0, Profile(True, "", 5))
    merged.push(1, Profile(True, "", 5))
    assert merged.next() == Profile(True, "", 5)
    assert merged.next() is None


def test_two_launchers_join_one_ffn_and_leave_it_one_after_the_other() -> None:
    with serving(TWO_ENGINES) as service:
        (group,), (first, second) = service.groups, service.lanes
        second.do("announce", plan(0, 0, 7))
        assert group.do("next_event") == plan(0, 0, 7)
        first.do("announce", plan(0, 5, 0, kind=StepKind.CAPTURE))
        assert group.do("next_event") == plan(0, 5, 0, kind=StepKind.CAPTURE)
        second.close()
        service.lanes.remove(second)
        first.do("announce", plan(1, 5, 0))
        assert group.do("next_event") == plan(1, 5, 0)
        first.do("shutdown")
        assert isinstance(group.do("next_event"), Shutdown)


def test_every_shard_hears_every_step_and_the_end() -> None:
    with serving(TWO_SHARDS) as service:
        (lane,) = service.lanes
        lane.do("announce", plan(0, 5))
        lane.do("announce", plan(1, 6, graph=True))
        lane.do("shutdown")
        for shard in service.groups:
            assert [shard.do("next_event") for _ in range(2)] == [plan(0, 5), plan(1, 6, graph=True)]
            assert isinstance(shard.do("next_event"), Shutdown)
        assert [member.data for member in lane.control.membership.members[1:]] == [
            {"store": "store of 0"}, {"store": "store of 1"},
        ]  # fmt: skip


def test_lanes_in_lockstep_are_served_by_every_shard() -> None:
    with serving(Topology(attention_dp=2, ffn_shards=2)) as service:
        for lane in service.lanes:
            lane.do("announce", plan(0, 5, 6))
        for shard in service.groups:
            assert shard.do("next_event") == plan(0, 5, 6)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_shard_that_fails_ends_the_other_and_the_lane(victim: int) -> None:
    with serving(TWO_SHARDS) as service:
        (lane,) = service.lanes
        other = service.groups[1 - victim]
        seen: list[Future[BaseException]] = [_failure(party) for party in (other, lane)]
        service.groups[victim].do("abort", "the experts are gone")
        for failure in seen:
            error = failure.result(PATIENCE_S)
            assert isinstance(error, PeerFailure)
            assert "the experts are gone" in str(error)


def _failure(party: Party) -> Future[BaseException]:
    found: Future[BaseException] = Future()
    threading.Thread(target=lambda: found.set_result(failure_of(party)), daemon=True).start()
    return found
