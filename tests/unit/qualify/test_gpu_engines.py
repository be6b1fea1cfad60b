# SPDX-License-Identifier: Apache-2.0
"""The children of a comparison, with a program in vLLM's place: what they say arrives, and nothing of them is left."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from qualify.gpu import engines
from qualify.gpu.engine_child import MARK
from qualify.gpu.engines import Engine, EngineError

CHILD = f"""#!{sys.executable}
import json, signal, subprocess, sys
if "deaf" in sys.argv[-1]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("a line for the log", flush=True)
print({MARK!r} + json.dumps({{"ready_s": 1.0, "below": below.pid}}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "stop":
        below.kill()
        below.wait()
        sys.exit(3)
    if command["do"] == "fall":
        sys.exit(5)
    print({MARK!r} + json.dumps(command), flush=True)
"""


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "child"
    program.write_text(CHILD)
    program.chmod(0o755)
    monkeypatch.setattr(engines.sys, "executable", str(program))
    monkeypatch.setattr(engines, "ENDING_S", 0.5)
    return tmp_path


def pipes_closed(engine: Engine) -> bool:
    process = engine.process
    return all(stream is not None and stream.closed for stream in (process.stdin, process.stdout))


def test_a_child_answers_and_ends_when_it_is_told_to(logs: Path) -> None:
    engine = Engine("one", {"model": "m"}, logs)
    assert engine.receive(30)["ready_s"] == 1.0
    assert engine.ask(30, "count", of=3) == {"do": "count", "of": 3}
    assert engine.close() == {"one": 3}
    assert pipes_closed(engine)
    assert (logs / "one.log").read_text() == "a line for the log\n"


@pytest.mark.parametrize("manner", ["polite", "deaf"])
def test_a_child_that_is_not_waited_for_ends_with_all_that_it_started(logs: Path, manner: str) -> None:
    engine = Engine("two", {"manner": manner}, logs)
    below = psutil.Process(engine.receive(30)["below"])
    assert engine.close(graceful=False) == {"two": None}
    assert pipes_closed(engine)
    deadline = time.monotonic() + 10
    while below.is_running() and below.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not below.is_running() or below.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_fell_is_an_error_with_its_log_and_what_it_started_ends_too(logs: Path) -> None:
    engine = Engine("three", {}, logs)
    below = psutil.Process(engine.receive(30)["below"])
    engine.tell("fall")
    with pytest.raises(EngineError, match=r"(?s)three ended with .*a line for the log"):
        engine.receive(30)
    assert engine.close() == {"three": 5}
    assert pipes_closed(engine)
    assert not below.is_running() or below.status() == psutil.STATUS_ZOMBIE
