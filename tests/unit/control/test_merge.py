# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from afd_plugin.control import messages as m
from afd_plugin.control.merge import Merger
from afd_plugin.control.statistics import Statistics
from afd_plugin.errors import PeerShutDown, ProtocolError
from afd_plugin.plan import StepKind, StepPlan
from tests.unit.control.harness import plan

EPOCH = 77


def merger(*lanes: int, all_lanes: int = 2) -> Merger:
    return Merger(EPOCH, lanes or (0, 1), all_lanes, 512, Statistics())


def step(
    number: int, *tokens: int, kind: StepKind = StepKind.REAL, graph: bool = False, epoch: int = EPOCH
) -> m.Step:
    return m.Step.of(epoch, plan(number, *tokens, kind=kind, graph=graph))


def events(subject: Merger) -> list[object]:
    found: list[object] = []
    while (event := subject.next()) is not None:
        found.append(event)
        if isinstance(event, m.Shutdown):
            break
    return found


def test_a_step_waits_for_every_lane() -> None:
    subject = merger()
    subject.push(0, step(1, 3, 4))
    assert subject.next() is None
    subject.push(1, step(1, 3, 4))
    assert subject.next() == plan(1, 3, 4)
    assert subject.next() is None


def test_a_resumed_step_is_delivered_with_the_exchange_it_goes_on_from() -> None:
    subject = merger()
    resumed = plan(7, 3, 4)._replace(resume=2)
    for lane in (0, 1):
        subject.push(lane, m.decode(m.encode(m.Step.of(EPOCH, resumed))))  # type: ignore[arg-type]
    assert events(subject) == [resumed]


def test_lanes_may_run_ahead_of_each_other() -> None:
    subject = merger()
    for number in range(5):
        subject.push(0, step(number, number, 0))
    assert subject.next() is None
    for number in range(5):
        subject.push(1, step(number, number, 0))
    assert events(subject) == [plan(number, number, 0) for number in range(5)]


@pytest.mark.parametrize(
    "other",
    [
        step(2, 3, 4),
        step(1, 3, 5),
        step(1, 3, 4, kind=StepKind.CAPTURE),
        step(1, 3, 4, graph=True),
        m.Step.of(EPOCH, plan(1, 3, 4)._replace(resume=1)),
        m.Step.of(EPOCH, StepPlan(1, StepKind.REAL, ((3, 0), (4, 0)))),
    ],
)
def test_lanes_that_disagree_are_a_protocol_error_that_shows_both(other: m.Step) -> None:
    subject = merger()
    subject.push(0, step(1, 3, 4))
    subject.push(1, other)
    with pytest.raises(ProtocolError, match="lanes 0 and 1 disagree") as error:
        subject.next()
    assert str(other.tokens) in str(error.value)


@pytest.mark.parametrize("idle", [0, 1])
def test_a_lane_without_requests_runs_a_dummy_beside_a_real_step(idle: int) -> None:
    subject = merger()
    subject.push(idle, step(1, 3, 1, kind=StepKind.DUMMY))
    subject.push(1 - idle, step(1, 3, 1))
    assert subject.next() == plan(1, 3, 1)


def test_a_step_without_requests_on_any_lane_stays_a_dummy() -> None:
    subject = merger()
    for lane in (0, 1):
        subject.push(lane, step(1, 1, 1, kind=StepKind.DUMMY))
    assert subject.next() == plan(1, 1, 1, kind=StepKind.DUMMY)


def test_a_capture_on_one_lane_beside_a_dummy_on_another_is_a_disagreement() -> None:
    subject = merger()
    subject.push(0, step(1, 1, 1, kind=StepKind.DUMMY))
    subject.push(1, step(1, 1, 1, kind=StepKind.CAPTURE))
    with pytest.raises(ProtocolError, match="disagree"):
        subject.next()


def test_messages_of_another_life_are_dropped_and_counted() -> None:
    subject = merger(0, all_lanes=1)
    for message in (step(1, 3, epoch=EPOCH - 1), m.Shutdown(EPOCH - 1), m.Drain(0), m.Profile(True, "", 5)):
        subject.push(0, message)
    assert subject.next() is None
    assert subject._statistics.dropped["stale-epoch"] == 4


@pytest.mark.parametrize("number", [5, 4, 0])
def test_step_numbers_grow(number: int) -> None:
    subject = merger(0, all_lanes=1)
    subject.push(0, step(5, 1))
    with pytest.raises(ProtocolError, match="must grow"):
        subject.push(0, step(number, 1))


@pytest.mark.parametrize("message", [step(1, 3), step(1, 3, 4, 5), step(1, 513, 0), step(1)])
def test_a_plan_that_does_not_fit_the_topology_is_a_protocol_error(message: m.Step) -> None:
    with pytest.raises(ProtocolError, match="lane 1"):
        merger().push(1, message)


def test_profile_is_delivered_once_and_in_order_with_steps() -> None:
    subject = merger()
    for message in (m.Profile(True, "p", EPOCH), step(1, 1, 1), step(2, 1, 1), m.Profile(False, "", EPOCH)):
        subject.push(0, message)
    for message in (step(1, 1, 1), m.Profile(True, "p", EPOCH), step(2, 1, 1), m.Profile(False, "", EPOCH)):
        subject.push(1, message)
    assert events(subject) == [
        m.Profile(True, "p", EPOCH),
        plan(1, 1, 1),
        plan(2, 1, 1),
        m.Profile(False, "", EPOCH),
    ]
    assert subject._statistics.dropped["redundant"] == 2


def test_a_second_profile_is_not_mistaken_for_the_first_of_a_late_lane() -> None:
    subject = merger()
    start, stop = m.Profile(True, "", EPOCH), m.Profile(False, "", EPOCH)
    for message in (start, stop, start):
        subject.push(0, message)
    for message in (start, stop):
        subject.push(1, message)
    assert events(subject) == [start, stop, start]


def test_drain_waits_for_every_lane_and_stops_no_step() -> None:
    subject = merger()
    for message in (m.Drain(EPOCH), step(1, 1, 1)):
        subject.push(0, message)
    assert subject.next() is None
    for message in (step(1, 1, 1), m.Drain(EPOCH)):
        subject.push(1, message)
    assert events(subject) == [plan(1, 1, 1), m.Drain(EPOCH)]


def test_shutdown_waits_for_every_lane_and_comes_after_the_steps() -> None:
    subject = merger()
    for lane in (0, 1):
        subject.push(lane, step(1, 1, 1))
        subject.push(lane, m.Shutdown(EPOCH))
    assert events(subject) == [plan(1, 1, 1), m.Shutdown(EPOCH)]


def test_one_lane_that_shuts_down_alone_ends_nothing() -> None:
    subject = merger()
    subject.push(0, m.Shutdown(EPOCH))
    assert subject.next() is None
    assert (subject.ended, subject.running) == ((0,), (1,))


def test_a_step_that_a_finished_lane_cannot_join_is_refused() -> None:
    subject = merger()
    subject.push(0, m.Shutdown(EPOCH))
    subject.push(1, step(4, 1, 1))
    with pytest.raises(PeerShutDown, match=r"lane 0 has shut down, but attention lane 1 announced step 4"):
        subject.next()


def test_nothing_follows_a_shutdown() -> None:
    subject = merger()
    subject.push(0, m.Shutdown(EPOCH))
    with pytest.raises(ProtocolError, match="after its Shutdown"):
        subject.push(0, step(1, 1, 1))


def test_a_lane_that_left_without_a_word_counts_as_shut_down_after_its_steps() -> None:
    subject = merger(0, all_lanes=1)
    subject.push(0, step(1, 1))
    subject.end(0)
    subject.end(0)
    assert events(subject) == [plan(1, 1), m.Shutdown(EPOCH)]


def test_a_group_merges_its_own_lanes_but_sees_the_tokens_of_all() -> None:
    subject = merger(2, 3, all_lanes=4)
    for lane in (2, 3):
        subject.push(lane, step(1, 1, 2, 3, 4))
    assert subject.next() == plan(1, 1, 2, 3, 4)
