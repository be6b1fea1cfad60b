# SPDX-License-Identifier: Apache-2.0
"""The zygote starts what `python` would start, without vLLM here: signals, status, descriptors, spawn."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.handover import worth_forking
from tests.e2e.zygote import Zygote

PROGRAM = """
import multiprocessing, os, signal, sys, time

def child(connection, value):
    connection.send((value * 2, os.environ["AFD_TEST"], "json" in sys.modules))
    sys.exit(7)

if __name__ == "__main__":
    what = sys.argv[1]
    if what == "spawn":
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs, 21))
        process.start()
        print(ours.recv(), flush=True)
        process.join(30)
        print(process.exitcode, sys.executable)
    elif what == "exit":
        print(os.getcwd(), os.environ["AFD_TEST"], sys.stdin.read())
        sys.exit(int(sys.argv[2]))
    elif what == "wait":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
        print(os.getpid(), flush=True)
        time.sleep(60)
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(os.environ, preloaded=("json",)) as running:
        yield running


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "afd_plugin_like"
    folder.mkdir()
    (folder / "afd_plugin.py").write_text(PROGRAM)
    return folder


def start(zygote: Zygote, folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [zygote.python, "-m", "afd_plugin", *words],
        cwd=folder,
        env={**os.environ, "AFD_TEST": "seen"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_a_fork_gets_the_folder_environment_input_and_gives_its_status(zygote: Zygote, program: Path) -> None:
    process = start(zygote, program, "exit", "3")
    output, _ = process.communicate("typed", timeout=30)
    assert output.split() == [str(program), "seen", "typed"]
    assert process.returncode == 3


def test_a_spawned_child_goes_through_the_zygote_and_keeps_its_status(zygote: Zygote, program: Path) -> None:
    output, _ = start(zygote, program, "spawn").communicate(timeout=30)
    assert output.splitlines() == ["(42, 'seen', True)", f"7 {zygote.python}"]


def test_a_signal_reaches_the_real_process(zygote: Zygote, program: Path) -> None:
    process = start(zygote, program, "wait")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert pid != process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 5
    assert gone(pid)


def test_a_real_process_that_is_killed_is_reported_as_killed(zygote: Zygote, program: Path) -> None:
    process = start(zygote, program, "wait")
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL


def test_killing_the_stand_in_kills_the_real_process(zygote: Zygote, program: Path) -> None:
    process = start(zygote, program, "wait")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=30)
    assert gone(pid)


def test_what_runs_when_the_zygote_ends_is_killed(program: Path) -> None:
    with Zygote(os.environ, preloaded=()) as zygote:
        process = start(zygote, program, "wait")
        assert process.stdout is not None
        pid = int(process.stdout.readline())
    process.communicate(timeout=30)
    assert gone(pid)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-m", "afd_plugin.cli.ffn_main", "x"], True),
        (["-u", "-m", "vllm.entrypoints.openai.api_server"], True),
        (["-c", "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=7)", "--x"], True),
        (["-c", "from multiprocessing.resource_tracker import main;main(5)"], False),
        (["-m", "pip"], False),
        (["script.py"], False),
    ],
)
def test_only_starts_that_import_vllm_are_handed_over(arguments: list[str], expected: bool) -> None:
    assert worth_forking(arguments) is expected
