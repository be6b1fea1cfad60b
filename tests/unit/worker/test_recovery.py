# SPDX-License-Identifier: Apache-2.0
"""Lanes over real planes whose FFN dies at an exact exchange and is started again: every answer comes, right, once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from afd_plugin.config import LinkSettings, Role
from afd_plugin.connectors.base import AFDConnector, ConnectorShape
from afd_plugin.connectors.tcp import TcpAFDConnector
from afd_plugin.control import AttentionControl, FFNControl
from afd_plugin.control.messages import Shutdown
from afd_plugin.errors import (
    AFDError,
    AskedToEnd,
    FingerprintMismatch,
    PeerAborted,
    PeerFailure,
    PeerLost,
)
from afd_plugin.model.placeholders import RemoteDense
from afd_plugin.model.scan import BoundUnit
from afd_plugin.plan import Exchange, RemoteUnit, StepKind, StepPlan, UnitKind, schedule
from afd_plugin.supervisor.ports import PortReservation
from afd_plugin.topology import Topology
from afd_plugin.v1.worker.recovery import Planes, Recovery
from afd_plugin.v1.worker.rejoin import Rejoining
from afd_plugin.v1.worker.resumable_link import ResumableLink
from afd_plugin.v1.worker.resume import POSITION_KEY, Progress, Sent
from tests.unit.control.harness import FAST, PATIENCE_S, fingerprint

pytestmark = pytest.mark.vllm

HIDDEN = 4
UNITS = tuple(RemoteUnit(index, f"layers.{index}.mlp", UnitKind.DENSE) for index in range(3))
FINGERPRINT = fingerprint(units=UNITS)

Deaths = dict[tuple[Exchange, str], AFDError | str]
"""At which exchange the FFN dies, before it answers ("received") or between two answers, and how it says so."""


def shape(lanes: int, lane: int | None) -> ConnectorShape:
    return ConnectorShape(lanes, lane, 16, HIDDEN, torch.float32, torch.device("cpu"), UNITS)


def answer(unit: int, rows: torch.Tensor) -> torch.Tensor:
    return rows * 2 + unit


class Dead(Exception):
    """The planted end of an FFN."""


class Life:
    """One life of the FFN, in a thread."""

    def __init__(self, settings: LinkSettings, topology: Topology, deaths: Deaths, **facts: Any) -> None:
        self.batches: list[tuple[Exchange, tuple[int, ...]]] = []
        self._topology = topology
        self._deaths = deaths
        self._order: AFDError | str | None = None
        self._pool = ThreadPoolExecutor(1)
        self.ended: Future[None] = self._pool.submit(self._run, settings, replace_facts(facts))

    def _run(self, settings: LinkSettings, facts: Any) -> None:
        control = FFNControl()
        connector = TcpAFDConnector(shape(self._topology.attention_dp, None), settings)
        try:
            control.listen(settings, self._topology, 0, facts, connector.offer())
            control.ready()
            connector.connect(control.wait_ready().group(0).data)
            while not isinstance(event := control.next_event(0.05), Shutdown):
                if isinstance(event, StepPlan) and not event.graph:
                    self._step(event, connector)
                self._check(self._order)
        except Dead as death:
            control.abort(death.args[0])
        finally:
            connector.close()
            control.close()

    def _step(self, plan: StepPlan, connector: AFDConnector) -> None:
        rows = plan.group_rows(range(self._topology.attention_dp), 0)
        for exchange in schedule(plan, UNITS):
            hidden, _ = connector.recv_hidden(exchange, UNITS[exchange.unit], rows)
            self.batches.append((exchange, rows))
            self._check(self._deaths.pop((exchange, "received"), None))
            output = answer(exchange.unit, hidden)
            connector.send_output(exchange, (rows[0], *(0 for _ in rows[1:])), output[: rows[0]])
            self._check(self._deaths.pop((exchange, "answering"), None))
            connector.send_output(exchange, (0, *rows[1:]), output[rows[0] :])

    def _check(self, order: AFDError | str | None) -> None:
        if order is not None:
            raise Dead(order)

    def die(self, order: AFDError | str = "planted") -> None:
        self._order = order


def replace_facts(facts: dict[str, Any]) -> Any:
    return fingerprint(units=UNITS, **facts)


@dataclass
class Lane:
    """One lane's worker: its link and what it was told at the end."""

    number: int
    recovery: Recovery
    link: ResumableLink
    planes: list[Planes] = field(default_factory=list)
    ends: list[AFDError] = field(default_factory=list)


class World:
    """All lanes and whatever FFN lives at the moment."""

    def __init__(self, topology: Topology, window_s: float, address: str) -> None:
        self.topology = topology
        self.window_s = window_s
        self.settings = replace(FAST, listen=address, peer=address, failure_timeout_s=5)
        self.lives: list[Life] = []
        self.lanes: list[Lane] = []
        self._threads = [ThreadPoolExecutor(1) for _ in range(topology.attention_dp)]
        self._barrier = threading.Barrier(topology.attention_dp, timeout=PATIENCE_S)

    def live(self, deaths: Deaths | None = None, **facts: Any) -> Life:
        self.lives.append(Life(self.settings, self.topology, {} if deaths is None else deaths, **facts))
        return self.lives[-1]

    def join(self, lane: int) -> Lane:
        """Runs in the lane's own thread, to which the planes then belong."""

        def connector(settings: LinkSettings) -> AFDConnector:
            return TcpAFDConnector(shape(self.topology.attention_dp, lane), settings)

        control = AttentionControl()
        failures: list[Callable[[AFDError], None]] = []

        def failed(error: AFDError) -> None:
            failures[0](error)

        control.on_failure(failed)
        control.connect(self.settings, self.topology, lane, FINGERPRINT)
        data_plane = connector(self.settings)
        control.ready()
        membership = control.wait_ready()
        data_plane.connect(membership.group(0).data)
        planes: list[Planes] = []
        ends: list[AFDError] = []
        recovery = Recovery(
            Planes(control, data_plane, membership),
            Progress(lane, len(UNITS)),
            Rejoining(self.settings, self.topology, lane, FINGERPRINT, connector),
            self.window_s,
            self.settings.failure_timeout_s,
            planes.append,
            ends.append,
        )
        failures.append(recovery.failed)
        units = [BoundUnit(unit, RemoteDense(Role.FFN, nn.Identity())) for unit in UNITS]
        group = SimpleNamespace(world_size=1)
        link = ResumableLink(recovery, lane, units, group, control, data_plane, self.topology.attention_dp)
        planes.append(recovery._planes)
        return Lane(lane, recovery, link, planes, ends)

    def run(self, lane: Lane, layouts: Sequence[Sequence[int]]) -> None:
        """The steps of one lane, in lockstep with the others."""
        for tokens in layouts:
            self._barrier.wait()
            with lane.link.step(StepKind.REAL, tuple((count,) for count in tokens)) as plan:
                rows = torch.arange(tokens[lane.number] * HIDDEN, dtype=torch.float32).view(-1, HIDDEN)
                rows += 1000 * lane.number + 10_000 * plan.step
                for unit in UNITS:
                    found = lane.link.exchange(unit, rows, None)
                    assert torch.equal(found, answer(unit.index, rows))
                    rows = rows + 1

    def each(self, action: Callable[[int], Any]) -> list[Any]:
        futures = [thread.submit(action, lane) for lane, thread in enumerate(self._threads)]
        return [future.result(PATIENCE_S) for future in futures]

    def start(self, layouts: Sequence[Sequence[int]]) -> list[Future[None]]:
        return [self.thread(lane.number).submit(self.run, lane, layouts) for lane in self.lanes]

    def thread(self, lane: int) -> ThreadPoolExecutor:
        """The lane's main thread."""
        return self._threads[lane]

    def close(self) -> None:
        def leave(lane: int) -> None:
            self.lanes[lane].recovery.close()
            for planes in self.lanes[lane].planes:
                planes.close()

        if self.lanes:
            self.each(leave)
        for life in self.lives:
            life.die()
            life.ended.exception(PATIENCE_S)


@contextmanager
def world(lanes: int, deaths: Deaths | None = None, window_s: float = 20.0) -> Iterator[World]:
    with PortReservation() as port:
        one = World(Topology(attention_dp=lanes), window_s, f"127.0.0.1:{port.port}")
        try:
            one.live(deaths)
            # One thread per lane: its planes belong to it.
            one.lanes = one.each(one.join)
            yield one
        finally:
            one.close()


def reborn(one: World, deaths: Deaths, futures: Sequence[Future[None]]) -> None:
    """Start the FFN again whenever it has died, until all lanes are through."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(future.done() for future in futures):
        assert time.monotonic() < deadline, "the lanes hang"
        if one.lives[-1].ended.done():
            one.live(deaths)
        time.sleep(0.01)
    for future in futures:
        future.result(0)


LAYOUTS = [(2, 1), (1, 3), (0, 2), (3, 0), (1, 1)]


@pytest.mark.parametrize(
    "moments",
    [
        [(0, 0, "received")],
        [(1, 1, "answering")],
        [(1, 2, "answering")],
        [(2, 1, "received")],
        [(3, 0, "answering")],
        [(0, 1, "received"), (0, 1, "answering"), (0, 2, "received"), (4, 2, "answering")],
    ],
    ids=["first", "between-answers", "at-the-end-of-a-step", "empty-lane", "other-empty-lane", "many"],
)
def test_two_lanes_get_every_answer_right_whenever_the_ffn_dies(moments: list[tuple[int, int, str]]) -> None:
    deaths: Deaths = {(Exchange(step, unit, 0), when): "planted" for step, unit, when in moments}
    with world(2, deaths) as one:
        reborn(one, deaths, one.start(LAYOUTS))
        assert not deaths, "every planted death has happened"
        assert [len(lane.planes) - 1 for lane in one.lanes] == [len(moments)] * 2
        epochs = [planes.membership.epoch for planes in one.lanes[0].planes]
        assert len(set(epochs)) == len(epochs), "each life has an epoch of its own"
        computed = {}
        for life in one.lives:
            for exchange, rows in life.batches:
                assert computed.setdefault(exchange, rows) == rows, "the same batch again"
        assert len(computed) == len(LAYOUTS) * len(UNITS)


def test_an_idle_lane_meets_the_next_ffn_without_being_asked_for_a_step() -> None:
    with world(1) as one:
        one.lives[0].die()
        one.lives[0].ended.result(PATIENCE_S)
        one.live()
        deadline = time.monotonic() + PATIENCE_S
        while len(one.lanes[0].planes) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for future in one.start([(2,), (1,)]):
            future.result(PATIENCE_S)


def test_an_ffn_that_is_lost_again_while_rows_are_sent_once_more_ends_that_wait() -> None:
    """No connection need end with it: the control plane alone may have heard."""
    aborted = threading.Event()
    told: list[Callable[[AFDError], None]] = []
    positions = ("4", "3")  # this lane is one exchange ahead of the other
    lanes = [
        SimpleNamespace(id=SimpleNamespace(role=Role.ATTENTION), data={POSITION_KEY: at}) for at in positions
    ]

    def receive(exchange: Exchange, rows: int) -> None:
        told[0](PeerLost("silence"))
        assert aborted.wait(PATIENCE_S), "nothing ended the wait"
        raise PeerLost("aborted")

    connector: Any = SimpleNamespace(
        abort=aborted.set, close=lambda: None, send_hidden=lambda *message: None, recv_output=receive
    )
    control: Any = SimpleNamespace(
        owner=0, announce=lambda plan: None, on_failure=told.append, close=lambda: None
    )
    planes = Planes(control, connector, SimpleNamespace(members=lanes))  # type: ignore[arg-type]
    progress = Progress(0, len(UNITS))
    progress.begin(StepPlan(1, StepKind.REAL, ((1,), (1,))))
    progress.complete(Sent(Exchange(1, 0, 0), UNITS[0], torch.zeros(1, HIDDEN), None))
    recovery = Recovery(
        planes, progress, lambda *facts: planes, 1.0, 1.0, lambda planes: None, lambda error: None
    )
    assert recovery._attempt(1.0, planes) is None
    assert aborted.is_set()


def test_when_the_window_passes_the_failure_is_the_one_that_it_was_and_is_told_once() -> None:
    deaths: Deaths = {(Exchange(0, 1, 0), "received"): "planted"}
    with world(1, deaths, window_s=1.0) as one:
        (future,) = one.start([(2,)])
        with pytest.raises(
            PeerAborted, match=r"planted No FFN came back within 1 s \(AFD_FFN_RESTART_WINDOW\)"
        ):
            future.result(PATIENCE_S)
        assert len(one.lanes[0].ends) == 1
        with pytest.raises(PeerFailure):
            one.lanes[0].link.check()


def test_an_ffn_that_was_started_with_something_else_is_refused_at_once() -> None:
    deaths: Deaths = {(Exchange(0, 1, 0), "received"): "planted"}
    with world(1, deaths) as one:
        (future,) = one.start([(2,)])
        one.lives[0].ended.result(PATIENCE_S)
        one.live(dtype="torch.float16")
        with pytest.raises(FingerprintMismatch, match="dtype"):
            future.result(10)
        assert isinstance(one.lives[1].ended.exception(10), FingerprintMismatch)


@pytest.mark.parametrize(
    "order", [AskedToEnd("it was asked to end"), PeerLost("lane 7 is gone")], ids=["sigterm", "other-lane"]
)
def test_what_nobody_will_start_again_ends_the_lane_at_once(order: AFDError) -> None:
    deaths: Deaths = {(Exchange(0, 1, 0), "received"): order}
    with world(1, deaths, window_s=60.0) as one:
        (future,) = one.start([(2,)])
        began = time.monotonic()
        with pytest.raises(PeerFailure):
            future.result(PATIENCE_S)
        assert time.monotonic() - began < 10
        assert len(one.lanes[0].ends) == 1


def test_a_step_inside_a_replayed_graph_fails_as_without_a_window() -> None:
    with world(1, window_s=60.0) as one:
        lane = one.lanes[0]

        def replay() -> None:
            with lane.link.step(StepKind.REAL, ((2,),), graph=True):
                one.lives[0].die()
                one.lives[0].ended.exception(PATIENCE_S)
                deadline = time.monotonic() + PATIENCE_S
                while not lane.ends and time.monotonic() < deadline:
                    time.sleep(0.01)
                lane.link.check()

        with pytest.raises(PeerAborted, match="planted"):
            one.thread(0).submit(replay).result(PATIENCE_S)


def test_closing_a_lane_while_its_ffn_is_down_is_quick_and_no_failure() -> None:
    with world(1, window_s=60.0) as one:
        one.lives[0].die()
        one.lives[0].ended.result(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while not one.lanes[0].planes[0].control.failed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        began = time.monotonic()
        one.lanes[0].recovery.close()
        assert time.monotonic() - began < 5
        assert one.lanes[0].ends == []
