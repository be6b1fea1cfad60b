# SPDX-License-Identifier: Apache-2.0
"""Who starts and who quits the MPS daemon, with a control program made by hand."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from qualify.gpu import mps


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the control program notes what it was told."""
    notes = tmp_path / "notes"
    tool = tmp_path / mps.CONTROL
    tool.write_text(f'#!/bin/sh\n[ "$1" = -d ] && echo start >> {notes} || cat >> {notes}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv(mps.PIPES, raising=False)
    return notes


def test_a_daemon_of_our_own_is_started_and_quit_and_its_folder_is_gone(told: Path) -> None:
    with mps.daemon() as running:
        pipes = Path(os.environ[mps.PIPES])
        assert running
        assert pipes.is_dir()
    assert told.read_text() == "start\nget_server_list\nquit -t 5\n"
    assert mps.PIPES not in os.environ
    assert not pipes.exists()


def test_a_daemon_that_answers_is_shared_and_left_running(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mps.PIPES, str(tmp_path))
    with mps.daemon() as running:
        assert running
        assert os.environ[mps.PIPES] == str(tmp_path)
    assert told.read_text() == "get_server_list\n"


def test_a_daemon_that_does_not_answer_is_replaced_for_the_time(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / mps.CONTROL).write_text(f'#!/bin/sh\n[ "$1" = -d ] && echo start >> {told} || exit 1\n')
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "gone"))
    with mps.daemon() as running:
        assert running
        assert os.environ[mps.PIPES] != str(tmp_path / "gone")
    assert told.read_text() == "start\n"
    assert os.environ[mps.PIPES] == str(tmp_path / "gone")


def test_a_daemon_and_a_server_that_do_not_quit_are_ended_by_their_ids(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that outlived its command was what a gate found left behind; a stranger of the same name stays."""
    monkeypatch.setattr(mps, "GONE_S", 0.5)
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
    daemon, server, stranger = processes
    (tmp_path / mps.CONTROL).write_text(
        f"""#!/bin/sh
if [ "$1" = -d ]; then echo {daemon.pid} > "$CUDA_MPS_PIPE_DIRECTORY/{mps.CONTROL}.pid"; exit; fi
read -r asked
echo "$asked" >> {told}
[ "$asked" != get_server_list ] || echo {server.pid}
"""
    )
    try:
        with mps.daemon():
            pass
        assert {process.wait(5) for process in (daemon, server)} == {-signal.SIGKILL}
        assert stranger.poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait(5)
    assert told.read_text() == "get_server_list\nquit -t 5\n"
    assert "did not quit within 20 s and was ended" in capsys.readouterr().err
