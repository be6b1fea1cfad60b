# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from afd_plugin.errors import AFDError, PeerAborted, PeerLost
from afd_plugin.topology import Topology
from tests.unit.control.harness import (
    FAST,
    PATIENCE_S,
    Child,
    Service,
    failure_of,
    fingerprint,
    meeting,
    plan,
    serving,
    still_waiting,
)

ONE = Topology()
LATE = replace(FAST, failure_timeout_s=20)
"""Silence is noticed 14 s after a heartbeat at the earliest: what is noticed within 10 s was noticed otherwise."""


@contextmanager
def ffn_with_remote_attention(settings: Any = FAST, lanes: int = 1) -> Iterator[tuple[Service, list[Child]]]:
    """FFN group 0 in this process, attention lanes in processes of their own, past the rendezvous."""
    topology = Topology(lanes, 1, 1, 1)
    with meeting(topology, settings) as service:
        listening = service.start_group(0)
        children = [Child("attention") for _ in range(lanes)]
        try:
            for lane, child in enumerate(children):
                child.send("connect", replace(settings, peer=service.peer), topology, lane, fingerprint())
            for child in children:
                assert child.answer() == "connect done"
            listening.result(PATIENCE_S)
            yield service, children
        finally:
            for child in children:
                child.signal(signal.SIGKILL)
                child.close()


def bring_up(service: Service, children: list[Child]) -> None:
    for name in ("ready", "wait_ready"):
        for child in children:
            child.send(name)
        service.groups[0].do(name)
        for child in children:
            assert child.answer() == f"{name} done"


def test_a_killed_attention_process_wakes_the_ffn_at_once() -> None:
    with ffn_with_remote_attention(LATE) as (service, (child,)):
        bring_up(service, [child])
        event = service.groups[0].start("next_event")
        assert still_waiting(event)
        killed = time.monotonic()
        child.signal(signal.SIGKILL)
        error = event.exception(PATIENCE_S)
        assert time.monotonic() - killed < 10
        assert isinstance(error, PeerLost)
        assert "connection" in str(error)
        assert "attention lane 0 (pid" in str(error)
        assert str(child.pid) in str(error)


def test_a_process_killed_while_it_loads_wakes_those_who_wait_for_ready() -> None:
    with ffn_with_remote_attention(LATE, lanes=2) as (service, children):
        children[0].send("ready")
        children[0].answer()
        children[0].send("wait_ready")
        service.groups[0].do("ready")
        waiting = service.groups[0].start("wait_ready")
        assert still_waiting(waiting)
        killed = time.monotonic()
        children[1].signal(signal.SIGKILL)
        error = waiting.exception(PATIENCE_S)
        assert isinstance(error, PeerLost)
        assert "attention lane 1" in str(error)
        answer = children[0].answer()
        assert time.monotonic() - killed < 10
        assert answer.startswith("PeerLost")
        assert "attention lane 1" in answer


def test_a_stopped_attention_process_is_found_within_the_bound() -> None:
    settings = replace(FAST, failure_timeout_s=4)
    with ffn_with_remote_attention(settings) as (service, (child,)):
        bring_up(service, [child])
        event = service.groups[0].start("next_event")
        stopped = time.monotonic()
        child.signal(signal.SIGSTOP)
        error = event.exception(PATIENCE_S)
        assert time.monotonic() - stopped < 4 + 4
        assert isinstance(error, PeerLost)
        assert "silent for 3 s (AFD_FAILURE_TIMEOUT=4)" in str(error)
        child.signal(signal.SIGCONT)


def test_a_short_stop_is_no_failure() -> None:
    settings = replace(FAST, failure_timeout_s=8, heartbeat_interval_s=0.5)
    with ffn_with_remote_attention(settings) as (service, (child,)):
        bring_up(service, [child])
        child.signal(signal.SIGSTOP)
        time.sleep(1.0)  # lint: allow sleeping: the length of the stop is what is tested
        child.signal(signal.SIGCONT)
        child.send("announce", plan(1, 7))
        assert child.answer() == "announce done"
        assert service.groups[0].do("next_event") == plan(1, 7)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_ffn_is_found_by_attention_within_the_bound(number: signal.Signals) -> None:
    killed = number == signal.SIGKILL
    settings = LATE if killed else replace(FAST, failure_timeout_s=4)
    with meeting(ONE, settings) as service:
        child = Child("ffn")
        try:
            child.send("listen", settings, ONE, 0, fingerprint(), {})
            service.peer = child.answer()
            service.start_lane(0).result(PATIENCE_S)
            assert child.answer() == "listen done"
            lane = service.lanes[0]
            lane.do("ready")
            waiting = lane.start("wait_ready")
            struck = time.monotonic()
            child.signal(number)
            error = waiting.exception(PATIENCE_S)
            assert time.monotonic() - struck < (10 if killed else 4 + 4)
            assert isinstance(error, PeerLost)
            assert "FFN group 0" in str(error)
            assert ("connection" if killed else "silent for 3 s") in str(error)
            with pytest.raises(PeerLost):
                lane.do("announce", plan(1, 7))
        finally:
            child.signal(signal.SIGKILL)
            child.close()


def test_an_abort_carries_the_error_and_the_end_of_its_traceback() -> None:
    def broken_layer() -> None:
        raise ValueError("boom at layer 3")

    with serving() as service:
        group, lane = service.groups[0], service.lanes[0]
        try:
            broken_layer()
        except ValueError as error:
            started = time.monotonic()
            group.do("abort", error)
            assert time.monotonic() - started < 5
        remote = failure_of(lane)
        (peer,) = group.control._monitor._net.peers.values()
        deadline = time.monotonic() + PATIENCE_S
        while not peer.confirmed:  # on a busy host after abort() has given up waiting for it
            assert time.monotonic() < deadline, "nobody has confirmed the abort"
            time.sleep(0.01)
        assert isinstance(remote, PeerAborted)
        assert remote.remote_error == "ValueError: boom at layer 3"
        assert any("broken_layer" in line for line in remote.traceback_tail)
        assert "boom at layer 3" in str(remote)
        assert "FFN group 0 (pid" in str(remote)
        with pytest.raises(PeerAborted):
            lane.do("announce", plan(1, 7))


def test_attention_can_abort_the_ffn_while_it_waits_for_a_step() -> None:
    with serving() as service:
        event = service.groups[0].start("next_event")
        service.lanes[0].do("abort", "out of pages", ["line 1", "line 2"])
        error = event.exception(PATIENCE_S)
        assert isinstance(error, PeerAborted)
        assert error.traceback_tail == ("line 1", "line 2")


def test_a_control_in_a_with_block_aborts_on_an_exception_and_closes() -> None:
    with serving() as service:
        group, lane = service.groups[0], service.lanes[0]

        def fail() -> None:
            with group.control:
                raise RuntimeError("inside the block")

        with pytest.raises(RuntimeError):
            group.run(fail)
        assert isinstance(failure_of(lane), PeerAborted)


def test_one_failure_reaches_every_member_with_its_first_cause() -> None:
    with serving(Topology(4, 1, 2, 1)) as service:
        service.lanes[3].do("abort", "only lane three")
        others = [*service.groups, *service.lanes[:3]]
        for party in others:
            error = failure_of(party)
            assert isinstance(error, PeerAborted)
            assert "attention lane 3" in str(error)
            assert "only lane three" in str(error)


def test_a_lost_member_is_named_alike_everywhere() -> None:
    with ffn_with_remote_attention(lanes=2) as (service, children):
        bring_up(service, children)
        children[0].signal(signal.SIGKILL)
        assert "attention lane 0" in str(failure_of(service.groups[0]))
        deadline = time.monotonic() + PATIENCE_S
        answer = "check done"
        while answer == "check done" and time.monotonic() < deadline:
            children[1].send("check")
            answer = children[1].answer()
        assert answer.startswith("PeerLost")
        assert "attention lane 0" in answer


def test_a_pause_of_the_whole_machine_is_no_failure() -> None:
    with serving(settings=replace(FAST, failure_timeout_s=2)) as service:
        controls = [party.control for party in (*service.groups, *service.lanes)]
        together = threading.Barrier(len(controls))
        heard: dict[int, int] = {}

        def pause(number: int) -> None:
            together.wait(PATIENCE_S)
            time.sleep(3)  # lint: allow sleeping: a thread that stands still is the planted fault
            heard[number] = controls[number].statistics.heartbeats_received

        for number, control in enumerate(controls):
            control._monitor._order(partial(pause, number))
        deadline = time.monotonic() + PATIENCE_S
        for number, control in enumerate(controls):
            # The third heartbeat after the pause comes when its length has been judged.
            while number not in heard or control.statistics.heartbeats_received < heard[number] + 3:
                assert time.monotonic() < deadline, "the service has not gone on"
                time.sleep(0.02)
        service.lanes[0].do("announce", plan(1, 7))
        assert service.groups[0].do("next_event") == plan(1, 7)


def test_callbacks_run_once_each_and_a_broken_one_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[AFDError] = []

    def broken(_: AFDError) -> None:
        raise RuntimeError("a bad callback")

    with serving() as service:
        lane = service.lanes[0].control
        lane.on_failure(broken)
        lane.on_failure(seen.append)
        service.groups[0].do("abort", "first")
        service.groups[0].do("abort", "second")
        failure_of(service.lanes[0])
        deadline = time.monotonic() + PATIENCE_S
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [type(error) for error in seen] == [PeerAborted]
        assert "first" in str(seen[0])
    assert "a bad callback" in caplog.text


def test_a_failure_seen_by_one_side_does_not_abort_it_back() -> None:
    with serving() as service:
        service.groups[0].do("abort", "the cause")
        failure_of(service.lanes[0])
        service.lanes[0].do("abort", "a consequence")
        service.lanes[0].do("close")
        assert service.groups[0].control._monitor.failure is None


def test_abort_before_the_rendezvous_and_after_the_end_does_nothing() -> None:
    with serving() as service:
        lane = service.lanes[0]
        lane.do("close")
        lane.do("abort", "too late")
        lane.do("close")


def test_a_step_connection_that_breaks_alone_is_a_failure() -> None:
    with serving() as service:
        # The heartbeat connection stays; only the socket that carries STEP goes.
        service.groups[0].run(lambda: service.groups[0].control._router.close(0))
        assert isinstance(failure_of(service.lanes[0]), PeerLost)
