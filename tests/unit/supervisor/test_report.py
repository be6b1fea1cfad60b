# SPDX-License-Identifier: Apache-2.0
"""Reports reach the launcher, and nothing malformed or absent harms either end."""

from __future__ import annotations

import json
import os
import queue
import socket
import time
from pathlib import Path

import pytest

from afd_plugin import report
from afd_plugin.errors import RendezvousTimeout
from afd_plugin.supervisor.inbox import Report, ReportInbox, decode_report


def test_phases_and_failures_arrive_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: queue.SimpleQueue[Report] = queue.SimpleQueue()
    inbox = ReportInbox(tmp_path, arrived.put)
    monkeypatch.setenv(report.REPORT_VARIABLE, str(inbox.path))
    monkeypatch.setenv(report.SOURCE_VARIABLE, "ffn-0")
    report.phase("serving", url="http://127.0.0.1:1")
    report.failure(RendezvousTimeout("Lane 0 is missing."))
    report.failure(SystemExit(0))
    report.failure(ValueError("a plain error"))
    got = [arrived.get(timeout=5) for _ in range(3)]
    inbox.close()
    assert [one.source for one in got] == ["ffn-0"] * 3
    assert (got[0].phase, got[0].details) == ("serving", {"url": "http://127.0.0.1:1"})
    assert (got[1].error, got[1].message, got[1].exit_code) == ("rendezvous-timeout", "Lane 0 is missing.", 4)
    assert (got[2].error, got[2].exit_code) == ("ValueError", 1)
    assert not inbox.path.exists()


def test_a_process_knows_for_how_long_its_launcher_has_been_stopping(tmp_path: Path) -> None:
    env = {report.REPORT_VARIABLE: str(tmp_path / "report")}
    assert report.stopping_for({}) == report.stopping_for(env) == 0.0
    marker = tmp_path / report.STOPPING_NAME
    marker.touch()
    assert 0.0 <= report.stopping_for(env) < 5.0
    os.utime(marker, (0, time.time() - 60))
    assert 60.0 <= report.stopping_for(env) < 65.0


def test_without_a_launcher_reports_do_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(report.REPORT_VARIABLE, raising=False)
    report.phase("serving")
    monkeypatch.setenv(report.REPORT_VARIABLE, str(tmp_path / "gone"))
    report.failure(RuntimeError("the launcher is gone"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"kind":"phase","source":"a","pid":1}',
        b'{"kind":"phase","source":"a","pid":"1","phase":"x","details":{}}',
        json.dumps({"kind": "failure", "source": "a", "pid": 1, "error": "e", "message": "m"}).encode(),
        json.dumps(
            {"kind": "failure", "source": "a", "pid": 1, "error": "e", "message": "m", "exit_code": 0}
        ).encode(),
    ],
)
def test_malformed_reports_are_ignored(data: bytes) -> None:
    assert decode_report(data) is None


def test_garbage_on_the_socket_does_not_stop_the_inbox(tmp_path: Path) -> None:
    arrived: queue.SimpleQueue[Report] = queue.SimpleQueue()
    inbox = ReportInbox(tmp_path, arrived.put)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"\x00garbage", str(inbox.path))
        sender.sendto(
            b'{"kind":"phase","source":"a","pid":1,"phase":"x","details":{"l":[1],"n":2}}', str(inbox.path)
        )
    assert arrived.get(timeout=5) == Report("a", 1, phase="x", details={"n": 2})
    inbox.close()
