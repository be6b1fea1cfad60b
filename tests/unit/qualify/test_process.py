# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qualify import process

IDLE = "import select; select.select([], [], [], 60)"


def test_a_failing_command_is_named_with_its_last_output() -> None:
    with pytest.raises(process.CommandError, match=r"(?s)exited with 3.*the reason"):
        process.capture([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])


def test_a_command_that_cannot_start_is_named() -> None:
    with pytest.raises(process.CommandError, match=r"no-such-command.*could not start"):
        process.capture(["no-such-command"])


def test_a_command_past_its_limit_is_ended() -> None:
    with pytest.raises(process.CommandError, match=r"limit of 0\.3 s"):
        process.capture([sys.executable, "-c", IDLE], timeout_s=0.3)


def test_a_long_command_logs_says_it_lives_and_fails_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    monkeypatch.setattr(process, "HEARTBEAT_S", 0.05)
    log = tmp_path / "log"
    slow = "import select; select.select([], [], [], 0.3); print('installed')"
    process.stream([sys.executable, "-c", slow], log=log, timeout_s=30)
    assert log.read_text() == "installed\n"
    assert "still at work" in capsys.readouterr().out
    with pytest.raises(process.CommandError, match=r"(?s)exited with 1.*not found: torch"):
        process.stream([sys.executable, "-c", "raise SystemExit('not found: torch')"], log=log, timeout_s=30)
    with pytest.raises(process.CommandError, match=r"limit of 0\.2 s"):
        process.stream(
            [sys.executable, "-c", "import select; select.select([], [], [], 60)"], log=log, timeout_s=0.2
        )


def test_the_tail_is_the_last_lines() -> None:
    assert process.tail("a\nb\nc\n", 2) == "b\nc"
