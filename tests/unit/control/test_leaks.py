# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
from dataclasses import replace

import psutil

from afd_plugin.control import AttentionControl, FFNControl, Shutdown
from afd_plugin.errors import AFDError
from afd_plugin.topology import Topology
from tests.unit.control.harness import FAST, PATIENCE_S, fingerprint, meeting, plan, serving


def _cycle(number: int) -> None:
    """One whole life, ended in one of four ways."""
    with serving() as service:
        (group,), (lane,) = service.groups, service.lanes
        lane.do("announce", plan(1, 7))
        group.do("next_event")
        if number % 4 == 1:
            lane.do("shutdown")
            assert isinstance(group.do("next_event"), Shutdown)
        elif number % 4 == 2:
            group.do("abort", "on purpose")
        elif number % 4 == 3:
            group.do("close")


def _held() -> tuple[int, int, int]:
    gc.collect()
    process = psutil.Process()
    listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return process.num_fds(), threading.active_count(), len(listening)


def test_two_hundred_lives_leave_nothing_behind() -> None:
    for number in range(20):
        _cycle(number)
    held, memory = _held(), psutil.Process().memory_info().rss
    for number in range(200):
        _cycle(number)
    assert _held() == held
    assert psutil.Process().memory_info().rss - memory < 8 << 20


def test_a_refused_or_timed_out_start_leaves_nothing_behind() -> None:
    short = replace(FAST, rendezvous_timeout_s=0.1)

    def fail() -> None:
        for start in (
            lambda: FFNControl().listen(short, Topology(), 0, fingerprint()),
            lambda: AttentionControl().connect(
                replace(short, peer="127.0.0.1:9"), Topology(), 0, fingerprint()
            ),
            lambda: FFNControl().listen(replace(short, listen="nonsense"), Topology(), 0, fingerprint()),
        ):
            try:
                start()
            except AFDError:
                continue
            raise AssertionError("it started")

    fail()
    held = _held()
    for _ in range(5):
        fail()
    assert _held() == held


def test_close_is_bounded_when_the_peer_does_not_answer() -> None:
    with meeting() as service:
        waiting = [service.start_group(0), service.start_lane(0)]
        for result in waiting:
            result.result(PATIENCE_S)
        # The FFN's monitor thread is busy elsewhere and confirms nothing.
        blocked, release = threading.Event(), threading.Event()
        service.groups[0].control._monitor._order(lambda: (blocked.set(), release.wait(PATIENCE_S)))
        assert blocked.wait(PATIENCE_S)
        try:
            closing = service.lanes[0].start("close")
            closing.result(3.0)
        finally:
            release.set()
