# SPDX-License-Identifier: Apache-2.0
"""A worker notices the death of its parent at once, and shows the error that says most."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from afd_plugin.control import AttentionControl
from afd_plugin.errors import PeerLost, ProtocolError
from afd_plugin.v1.worker.parent_watch import ParentWatch
from afd_plugin.v1.worker.verdict import verdict
from tests.unit.control.harness import serving

PATIENCE_S = 30.0


def _worker(folder: Path) -> None:
    died = threading.Event()
    seen: list[int] = []

    def note(pid: int) -> None:
        seen.append(pid)
        died.set()

    watch = ParentWatch(note)
    (folder / "started").write_text(str(os.getpid()))
    died.wait(PATIENCE_S)
    partial = folder / "seen.partial"
    partial.write_text(f"{seen} {watch.parent_died()}")
    partial.rename(folder / "seen")


def _host(folder: Path) -> None:
    worker = multiprocessing.get_context("spawn").Process(target=_worker, args=(folder,))
    worker.start()
    worker.join(PATIENCE_S)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)
    return path.read_text()


def test_the_death_of_the_parent_is_noticed_at_once(tmp_path: Path) -> None:
    host = multiprocessing.get_context("spawn").Process(target=_host, args=(tmp_path,))
    host.start()
    wait_for(tmp_path / "started")
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    killed = time.monotonic()
    assert wait_for(tmp_path / "seen") == f"[{host.pid}] True"
    assert time.monotonic() - killed < PATIENCE_S / 3  # a worker that notices nothing says so after all of it
    host.join(PATIENCE_S)


def test_without_a_parent_of_multiprocessing_nothing_is_watched_and_closing_is_idempotent() -> None:
    def never(pid: int) -> None:
        raise AssertionError("the parent lives")

    before = threading.active_count()
    watch = ParentWatch(never)
    assert threading.active_count() == before
    assert not watch.parent_died()
    watch.close()
    watch.close()


def test_a_lost_connection_is_explained_by_what_the_control_plane_learns_a_moment_later() -> None:
    with serving() as service:
        lane = service.lanes[0].control
        threading.Timer(0.1, service.groups[0].control.abort, ["the experts are on fire"]).start()
        found = verdict(lane, PeerLost("connection reset"), patience_s=PATIENCE_S)
    assert "the experts are on fire" in str(found)


@pytest.mark.parametrize("error", [PeerLost("connection reset"), ProtocolError("rows")])
def test_an_error_that_nobody_explains_is_shown_as_it_is(error: Exception) -> None:
    with serving() as service:
        began = time.monotonic()
        assert verdict(service.lanes[0].control, error, patience_s=0.2) is error
    assert time.monotonic() - began < PATIENCE_S
    assert verdict(None, error) is error
    assert verdict(AttentionControl(), error, patience_s=0.0) is error
