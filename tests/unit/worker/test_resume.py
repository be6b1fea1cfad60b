# SPDX-License-Identifier: Apache-2.0
"""Whatever the lanes were doing when the FFN died, they agree on where to go on, and nobody notices afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin.errors import NotResumable
from afd_plugin.plan import Exchange, RemoteUnit, StepKind, StepPlan, UnitKind, schedule
from afd_plugin.v1.worker.resume import (
    POSITION_KEY,
    Action,
    Progress,
    Resumption,
    Sent,
    decide,
    positions_of,
)

UNITS = tuple(RemoteUnit(index, f"layers.{index}.mlp.experts", UnitKind.EXPERTS) for index in range(3))


def plan(step: int, *tokens: int, kind: StepKind = StepKind.REAL, graph: bool = False) -> StepPlan:
    return StepPlan(step, kind, tuple((count,) for count in tokens), graph)


def progress(lane: int, begun: StepPlan | None, completed: int = 0) -> Progress:
    found = Progress(lane, len(UNITS))
    if begun is not None:
        found.begin(begun)
        for index in range(completed):
            found.complete(Sent(Exchange(begun.step, index, 0), UNITS[index], f"rows of {lane}", None))
    return found


STEP = plan(4, 2, 1)


@pytest.mark.parametrize(
    ("begun", "completed", "others", "expected"),
    [
        (None, 0, 0, Resumption(Action.NOTHING)),
        (STEP, 0, 12, Resumption(Action.ANNOUNCE, STEP)),
        (STEP, 1, 13, Resumption(Action.ANNOUNCE, STEP._replace(resume=1))),
        (STEP, 1, 12, Resumption(Action.REPLAY, STEP)),
        (STEP, 2, 13, Resumption(Action.REPLAY, STEP._replace(resume=1))),
        (STEP, 3, 14, Resumption(Action.REPLAY, STEP._replace(resume=2))),
        (STEP, 3, 15, Resumption(Action.NOTHING)),
        (STEP, 1, 14, Resumption(Action.ANNOUNCE, STEP._replace(resume=1))),
        (plan(4, 0, 1), 0, 13, Resumption(Action.ANNOUNCE, plan(4, 0, 1)._replace(resume=1))),
        (plan(4, 0, 1), 0, 15, Resumption(Action.NOTHING)),
    ],
)
def test_what_a_lane_does_first(
    begun: StepPlan | None, completed: int, others: int, expected: Resumption
) -> None:
    own = progress(0, begun, completed)
    assert decide(own, [own.position, others]) == expected


@pytest.mark.parametrize(
    ("begun", "completed", "others", "told"),
    [
        (STEP, 2, 12, "2 exchanges ahead"),
        (STEP, 0, 11, "in an earlier step"),
        (plan(4, 2, 1, graph=True), 1, 13, "no eager step"),
        (plan(4, 2, 1, kind=StepKind.CAPTURE), 1, 13, "no eager step"),
        (StepPlan(4, StepKind.REAL, ((2, 1), (1, 1))), 1, 13, "no eager step"),
    ],
)
def test_what_cannot_go_on_is_said(begun: StepPlan, completed: int, others: int, told: str) -> None:
    own = progress(0, begun, completed)
    with pytest.raises(NotResumable, match=told):
        decide(own, [own.position, others])


def test_a_lane_that_kept_nothing_cannot_send_it_again() -> None:
    own = progress(0, STEP, 1)
    own.last = None
    with pytest.raises(NotResumable, match="1 exchanges ahead"):
        decide(own, [own.position, own.position - 1])


def test_a_replayed_graph_ends_its_step_as_a_whole() -> None:
    own = progress(0, plan(4, 2, 1, graph=True))
    own.finish()
    assert decide(own, [own.position, own.position]).action is Action.NOTHING


@pytest.mark.parametrize(
    ("begun", "completed", "expected"),
    [
        (None, 0, True),
        (STEP, 1, True),
        (plan(4, 2, 1, graph=True), 0, False),
        (plan(4, 2, 1, graph=True), 3, True),
        (plan(4, 0, 1, graph=True), 0, True),
        (plan(4, 2, 1, kind=StepKind.CAPTURE), 0, False),
    ],
)
def test_inside_a_replayed_graph_there_is_no_way_on(
    begun: StepPlan | None, completed: int, expected: bool
) -> None:
    assert progress(0, begun, completed).can_go_on is expected


def test_a_lane_without_a_position_is_an_error_that_names_it() -> None:
    assert positions_of([{POSITION_KEY: "7"}, {POSITION_KEY: "8"}]) == (7, 8)
    for entry in ({}, {POSITION_KEY: ""}, {POSITION_KEY: "-1"}, {POSITION_KEY: "x"}):
        with pytest.raises(NotResumable, match="lane 1"):
            positions_of([{POSITION_KEY: "7"}, entry])


@dataclass
class Lane:
    """A lane's main thread as a generator of what it waits for; `got` is what it has been answered, in order."""

    number: int
    steps: list[StepPlan]
    state: Progress
    inbox: list[Exchange] = field(default_factory=list)
    got: list[Exchange] = field(default_factory=list)
    announced: StepPlan | None = None
    sent: Exchange | None = None
    arrived: int = 0

    def __post_init__(self) -> None:
        self.thread = self._run()
        self.waits_for = next(self.thread)

    def _run(self) -> Iterator[str]:
        for one in self.steps:
            self.arrived += 1
            yield "others"  # vLLM agrees on the rows of a step across its lanes before it runs
            self.state.begin(one)
            self.announced = one
            while self.state.completed < len(UNITS):
                due = Exchange(one.step, self.state.completed, 0)
                self.sent = due
                while not self.inbox:
                    yield "answer"
                answer = self.inbox.pop()
                assert answer == due
                self.got.append(answer)
                self.state.complete(Sent(due, UNITS[due.unit], (self.number, due), None))
        yield "end"

    def go(self) -> None:
        self.waits_for = next(self.thread)


class World:
    """Lanes in lockstep with one FFN that dies when the script says so, and what it computed."""

    def __init__(self, steps: list[StepPlan], lanes: int, deaths: list[int]) -> None:
        self.lanes = [Lane(number, steps, Progress(number, len(UNITS))) for number in range(lanes)]
        self.steps = steps
        self.deaths = deaths
        self.actions = 0
        self.batches: dict[Exchange, set[tuple[tuple[int, Exchange], ...]]] = {}

    def act(self) -> None:
        """One action of the FFN; raises when it is its last."""
        self.actions += 1
        if self.deaths and self.actions >= self.deaths[0]:
            self.actions = 0
            self.deaths.pop(0)
            raise ConnectionError

    def run(self) -> None:
        while not all(lane.waits_for == "end" for lane in self.lanes):
            try:
                self.serve()
            except ConnectionError:
                self.restart()

    def serve(self) -> None:
        for lane in self.lanes:
            if lane.waits_for == "others" and all(one.arrived >= lane.arrived for one in self.lanes):
                self.act()
                lane.go()
        announced = [lane.announced for lane in self.lanes if lane.announced is not None]
        if len(announced) == len(self.lanes):
            self.act()
            assert len(set(announced)) == 1, "all lanes announce the same, its first exchange included"
            self.compute(announced[0])
            for lane in self.lanes:
                lane.announced = None

    def compute(self, one: StepPlan) -> None:
        for exchange in schedule(one, UNITS):
            present = [lane for lane in self.lanes if one.lane_tokens(lane.number)]
            if not present:
                continue
            for lane in present:
                self.act()
                assert lane.sent == exchange, "the rows that are due"
            batch = tuple((lane.number, exchange) for lane in present)
            self.batches.setdefault(exchange, set()).add(batch)
            for lane in present:
                self.act()
                self.answer(lane, exchange)

    @staticmethod
    def answer(lane: Lane, exchange: Exchange) -> None:
        if exchange in lane.got:
            lane.sent = Exchange(
                exchange.step, exchange.unit + 1, 0
            )  # a replay: dropped, and the thread goes on
            return
        lane.inbox.append(exchange)
        lane.go()

    def restart(self) -> None:
        positions = [lane.state.position for lane in self.lanes]
        for lane in self.lanes:
            lane.announced = None
            resumption = decide(lane.state, positions)
            if resumption.plan is None:
                continue
            lane.announced = resumption.plan
            if resumption.action is Action.REPLAY:
                assert lane.state.last is not None
                lane.sent = lane.state.last.exchange


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.integers(1, 4).flatmap(
        lambda lanes: st.lists(
            st.lists(st.integers(0, 3), min_size=lanes, max_size=lanes), min_size=1, max_size=5
        )
    ),
    deaths=st.lists(st.integers(1, 40), max_size=6),
)
def test_every_lane_gets_every_answer_once_and_in_order_whenever_the_ffn_dies(
    tokens: list[list[int]], deaths: list[int]
) -> None:
    steps = [plan(number, *rows) for number, rows in enumerate(tokens)]
    world = World(steps, len(tokens[0]), list(deaths))
    world.run()
    for lane in world.lanes:
        due = [
            Exchange(one.step, unit.index, 0)
            for one in steps
            if one.lane_tokens(lane.number)
            for unit in UNITS
        ]
        assert lane.got == due
    for batches in world.batches.values():
        assert len(batches) == 1, "an exchange is always computed with the rows of the same lanes"
