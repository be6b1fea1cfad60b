# SPDX-License-Identifier: Apache-2.0
"""What a supervisor promises about its children, shown with small Python children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from afd_plugin.supervisor.processes import members_of
from afd_plugin.supervisor.spec import Outcome, TimeLimits
from afd_plugin.supervisor.supervisor import Details
from tests.unit.supervisor.harness import LIMITS, SERVE, Run, child


def test_a_clean_end_of_all_children_is_exit_code_0(tmp_path: Path) -> None:
    run = Run(tmp_path, child("a", "print('hello')\nreport.phase('serving', port=7)"))
    assert run.outcome == Outcome(0)
    assert run.ready == [{"a": {"port": 7}}]
    assert "[a] hello" in run.log


def test_a_signal_stops_the_first_children_and_waits_for_the_last_to_end_in_band(tmp_path: Path) -> None:
    flag = tmp_path / "told"
    first = child("attention-0", f"{SERVE}Path({str(flag)!r}).write_text('x')")
    last = child(
        "ffn-0",
        f"""
        report.phase('serving')
        while not Path({str(flag)!r}).exists():
            assert not stop.is_set(), 'the FFN was signalled although it could be told in-band'
            time.sleep(0.02)
        """,
        order=1,
    )

    class Stopping(Run):
        def on_ready(self, details: Mapping[str, Details]) -> None:
            super().on_ready(details)
            os.kill(os.getpid(), signal.SIGTERM)

    run = Stopping(tmp_path, first, last)
    assert run.outcome == Outcome(0, asked_to_stop=True)
    assert "asking attention-0 to stop" in run.log
    assert "asking ffn-0 to stop" not in run.log


def test_a_signal_during_start_stops_everyone_at_once(tmp_path: Path) -> None:
    killer = child("a", f"os.kill({os.getpid()}, signal.SIGINT)\nstop.wait()")
    waiting = child("b", "stop.wait()", order=1)
    run = Run(tmp_path, killer, waiting)
    assert run.outcome == Outcome(0, asked_to_stop=True)
    assert run.ready == []


def test_a_failing_child_takes_the_others_along_and_is_named(tmp_path: Path) -> None:
    begun = time.monotonic()
    run = Run(tmp_path, child("a", SERVE), child("b", "time.sleep(0.5)\nsys.exit(7)"))
    assert run.outcome.exit_code == 1
    assert run.outcome.cause is not None
    assert run.outcome.cause.message == "b exited with code 7."
    assert run.left() == []
    assert time.monotonic() - begun < 10


def test_a_failure_report_gives_the_sentence_and_the_exit_code(tmp_path: Path) -> None:
    body = "report.failure(ConfigRefused('Unknown key afd.x; known keys are y.'))\nsys.exit(1)"
    run = Run(tmp_path, child("a", SERVE), child("b", body))
    assert run.outcome.exit_code == 2
    assert run.outcome.cause is not None
    assert run.outcome.cause.message == "Unknown key afd.x; known keys are y."


def test_the_peer_that_notices_is_not_the_cause(tmp_path: Path) -> None:
    victim = child("ffn-0", "report.phase('serving')\ncomplete()\nos.kill(os.getpid(), 9)", order=1)
    peer = child(
        "attention-0",
        """
        report.phase('serving')
        logged('ffn-0 was ended by SIGKILL')
        report.failure(PeerLost('FFN group 0 is gone.'))
        sys.exit(3)
        """,
    )
    run = Run(tmp_path, peer, victim, limits=replace(LIMITS, failure=20.0))
    assert "attention-0 failed: peer-lost" in run.log
    assert run.outcome.cause is not None
    assert run.outcome.cause.message == "ffn-0 was ended by SIGKILL."
    assert run.outcome.exit_code == 1


def test_a_stopped_grandchild_is_found_ended_and_named_within_the_bound(tmp_path: Path) -> None:
    body = """
    inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
    report.phase('serving', inner=inner.pid)
    complete()
    os.kill(inner.pid, signal.SIGSTOP)
    inner.wait()
    print('noticed')
    """
    begun = time.monotonic()
    # The child ends by itself once it has noticed, and is given the time for it: only the stopped process is killed.
    run = Run(tmp_path, child("a", body), limits=replace(LIMITS, failure=20.0))
    assert run.outcome.cause is not None
    assert run.outcome.cause.error == "process-stopped"
    assert "[a] noticed" in run.log
    (killed,) = run.outcome.killed
    assert killed.startswith(f"{run.ready[0]['a']['inner']} (")
    assert time.monotonic() - begun < 10
    assert run.left() == []


LOST = """
    engine = "open('/proc/self/comm', 'w').write('TITLE::Worker'); import time; time.sleep(60)"
    inner = subprocess.Popen([sys.executable, '-c', engine])
    while 'TITLE' not in open(f'/proc/{inner.pid}/comm').read():
        time.sleep(0.01)
    report.phase('serving')
    complete()
    LAST_WORDS
    inner.kill()
    inner.wait()
    stop.wait(SECONDS)
    """


@pytest.mark.parametrize("prefix", ["VLLM", "prod"])
def test_a_child_that_goes_on_without_its_engine_is_ended_and_the_engine_named(
    prefix: str, tmp_path: Path
) -> None:
    """Whatever vLLM's variable for the titles says."""
    begun = time.monotonic()
    lost = LOST.replace("TITLE", prefix).replace("LAST_WORDS", "").replace("SECONDS", "")
    run = Run(tmp_path, child("a", lost))
    assert run.outcome.cause is not None
    assert run.outcome.cause.error == "engine-gone"
    assert f"{prefix}::Worker" in run.outcome.cause.message
    assert time.monotonic() - begun < 10
    assert run.left() == []


def test_a_child_that_is_leaving_may_outlive_its_engine(tmp_path: Path) -> None:
    """On a busy machine it takes longer to end than a child may otherwise go on without its engine."""
    words = LOST.replace("LAST_WORDS", "report.phase(report.LEAVING)")
    run = Run(tmp_path, child("a", words.replace("SECONDS", str(LIMITS.answer + 2))))
    assert run.outcome.cause is None, run.log
    assert run.outcome.exit_code == 0
    assert run.left() == []


def test_a_stubborn_child_is_killed_counted_and_makes_the_stop_unclean(tmp_path: Path) -> None:
    body = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report.phase('serving')
    os.kill({os.getpid()}, signal.SIGTERM)
    time.sleep(60)
    """
    run = Run(tmp_path, child("a", body), limits=TimeLimits(20.0, 2.0, 1.0, 0.5, 0.2))
    assert run.outcome.exit_code == 1
    assert run.outcome.cause is not None
    assert run.outcome.cause.error == "drain-timeout"
    assert len(run.outcome.killed) == 1
    assert run.left() == []


def test_an_orphaned_grandchild_is_not_left_behind(tmp_path: Path) -> None:
    body = """
    code = 'import signal, time; signal.signal(15, signal.SIG_IGN); print("deaf", flush=True); time.sleep(60)'
    inner = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)
    assert inner.stdout.readline() == b'deaf\\n'
    """
    run = Run(tmp_path, child("a", body))
    assert run.left() == []
    assert run.outcome.exit_code == 1
    assert run.outcome.cause is not None
    assert run.outcome.cause.error == "unclean-stop"


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    body = f"""
    report.phase('serving')
    os.kill({os.getpid()}, signal.SIGTERM)
    stop.wait()
    os.kill({os.getpid()}, signal.SIGTERM)
    time.sleep(60)
    """
    begun = time.monotonic()
    run = Run(tmp_path, child("a", body))
    assert run.outcome.exit_code == 1
    assert time.monotonic() - begun < 8
    assert run.left() == []


def test_a_service_that_never_becomes_ready_ends_by_the_startup_bound(tmp_path: Path) -> None:
    run = Run(tmp_path, child("a", "stop.wait()"), limits=TimeLimits(1.0, 1.0, 5.0, 1.0, 0.2))
    assert run.outcome.exit_code == 4
    assert run.outcome.cause is not None
    assert "a (starting)" in run.outcome.cause.message


def test_a_flood_of_output_holds_nobody_up(tmp_path: Path) -> None:
    run = Run(tmp_path, child("a", "for _ in range(50_000): print('z' * 80)\nreport.phase('serving')"))
    assert run.outcome == Outcome(0)


LAUNCHER = """
import os, sys
from afd_plugin.supervisor.sink import LogSink
from afd_plugin.supervisor.spec import ChildSpec, TimeLimits
from afd_plugin.supervisor.supervisor import Supervisor
code = '''
import subprocess, sys, time
from afd_plugin import report
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
report.phase("serving", inner=inner.pid)
time.sleep(120)
'''
spec = ChildSpec("a", (sys.executable, "-c", code), dict(os.environ))
sink = LogSink(1)
def ready(details):
    sink.line("ready", str(details["a"]["inner"]))
Supervisor([spec], TimeLimits(terminate=1.0), sink, ready).run()
"""


def test_killing_the_launcher_takes_all_its_processes_along(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    assert launcher.stdout is not None
    pids = []
    for line in launcher.stdout:
        if b"started a as process" in line or b"[ready]" in line:
            pids.append(int(line.split()[-1]))
        if b"[ready]" in line:
            break
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(10)
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and _alive(pid) for pid in pids) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, f"left: {pids}, {list(tmp_path.iterdir())}"
        time.sleep(0.1)
    assert len(pids) == 2
    launcher.communicate(timeout=10)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_children_need_unique_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unique names"):
        Run(tmp_path, child("a", SERVE), child("a", SERVE))


def test_a_launcher_that_stays_stopped_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    program = LAUNCHER.replace("TimeLimits(terminate=1.0)", "TimeLimits(failure=2.0)")
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env)
    assert launcher.stdout is not None
    pids = []
    for line in launcher.stdout:
        if b"started a as process" in line or b"[ready]" in line:
            pids.append(int(line.split()[-1]))
        if b"[ready]" in line:
            break
    launcher.send_signal(signal.SIGSTOP)
    assert launcher.wait(15) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, f"left: {pids}, {list(tmp_path.iterdir())}"
        time.sleep(0.1)
    launcher.communicate(timeout=10)


def test_each_child_has_scratch_folders_that_are_gone_afterwards(tmp_path: Path) -> None:
    body = (
        "print('folder', os.environ['X'], os.listdir(os.environ['X']), flush=True)\nreport.phase('serving')"
    )
    run = Run(tmp_path, replace(child("a", body), scratch={"X": "metrics"}))
    (line,) = [line for line in run.log.splitlines() if "folder" in line]
    folder = line.split()[2]
    assert line.endswith("[]")
    assert folder.endswith("a-metrics")
    assert not Path(folder).exists()


def test_a_fault_names_the_processes_that_had_ended_by_then(tmp_path: Path) -> None:
    body = """
    inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
    report.phase('serving', inner=inner.pid)
    complete()
    inner.kill()
    inner.wait()
    report.failure(PeerLost('The engine ended.'))
    sys.exit(1)
    """
    run = Run(tmp_path, child("a", body))
    inner = run.ready[0]["a"]["inner"]
    assert run.outcome.cause is not None
    assert run.outcome.cause.message.startswith(
        f"The engine ended. Processes that had ended by then: {inner} ("
    )


def test_shared_memory_of_killed_processes_is_removed(tmp_path: Path) -> None:
    body = """
    from multiprocessing import resource_tracker, shared_memory
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    block = shared_memory.SharedMemory(create=True, size=4096)
    report.phase('serving', block=block.name)
    report.failure(PeerLost('The peer is gone.'))
    time.sleep(60)
    """
    run = Run(tmp_path, child("a", body))
    assert run.outcome.killed
    assert not Path("/dev/shm", str(run.ready[0]["a"]["block"])).exists()  # noqa: S108
    assert run.left() == []


def test_a_stop_during_start_reaches_the_workers_that_still_start(tmp_path: Path) -> None:
    body = f"""
    inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
    time.sleep(0.3)
    os.kill({os.getpid()}, signal.SIGTERM)
    inner.wait()
    """
    begun = time.monotonic()
    run = Run(tmp_path, child("a", body))
    assert run.outcome == Outcome(0, asked_to_stop=True)
    assert time.monotonic() - begun < 8


def test_a_long_temporary_folder_leaves_room_for_the_sockets_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    run = Run(tmp_path, child("a", "print('folder', os.environ['TMPDIR'])\nreport.phase('serving')"))
    (line,) = [line for line in run.log.splitlines() if "folder" in line]
    assert len(line.split()[2]) + 1 + 36 <= 107


def test_a_process_with_the_number_of_a_leader_that_ended_is_left_alone() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert members_of([stranger.pid]) == []  # it leads no session, so the number is not a child's
    finally:
        stranger.kill()
        stranger.wait()
