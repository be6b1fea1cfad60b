# SPDX-License-Identifier: Apache-2.0
"""The teardown checker finds what it is there to find: each kind of leftover is planted, and named."""

import os
import secrets
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.teardown import CaseFailed, Traces, end_marked, forced, nothing_left

SHARED = Path("/dev/shm")  # noqa: S108


@contextmanager
def process(traces: Traces, code: str) -> Iterator["subprocess.Popen[str]"]:
    """A process of the case."""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **traces.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_case_that_leaves_nothing_passes(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("stopped\n", encoding="utf-8")
    with nothing_left(tmp_path) as traces, process(traces, "input()") as child:
        traces.note()
        child.communicate("\n")
    assert not traces.folder.exists()


def test_a_process_that_is_left_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.e2e.teardown.GRACE_S", 0.2)
    traces = Traces()
    with process(traces, "input()") as child:
        (fault,) = traces.found()
        assert str(child.pid) in fault
        assert child.wait(timeout=10) < 0
    traces.remove()


def test_a_process_that_ends_while_it_is_looked_at_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces()
    with process(traces, "input()") as child:
        seen = psutil.Process(child.pid)
    monkeypatch.setattr("tests.e2e.teardown.GRACE_S", 0.0)
    monkeypatch.setattr("tests.e2e.teardown.marked", lambda marker: [seen])
    assert end_marked(traces.marker) == []
    traces.remove()


def test_a_temporary_file_that_is_left_is_named() -> None:
    case = nothing_left()
    traces = case.__enter__()
    (traces.folder / "vllm_dist_0").touch()
    (traces.folder / "torchinductor_somebody").mkdir()
    with pytest.raises(CaseFailed, match=r"^the temporary file vllm_dist_0 was left$"):
        case.__exit__(None, None, None)
    assert not traces.folder.exists()


def test_of_sockets_only_those_of_vllms_message_queues_may_be_left() -> None:
    traces = Traces()
    for name in ("somebodys.sock", str(uuid.uuid4())):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(traces.folder / name))
    assert traces.found() == ["the temporary file somebodys.sock was left"]
    traces.remove()


@pytest.mark.skipif(not SHARED.is_dir(), reason="this system has no /dev/shm")
def test_shared_memory_of_the_case_that_is_left_is_named_unless_a_live_process_uses_it() -> None:
    path = SHARED / f"test-teardown-{secrets.token_hex(4)}"
    code = (
        f"import mmap; f = open({str(path)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 4096); "
        "print(1, flush=True); input()"
    )
    ours, theirs = Traces(), Traces()
    path.write_bytes(b"0" * 4096)
    try:
        with process(ours, code) as one, process(theirs, code) as other:
            for child in (one, other):
                assert child.stdout is not None
                child.stdout.readline()
            ours.note()
            one.communicate("\n")
            assert ours.found() == []
        assert ours.found() == [f"the shared memory {path} was left"]
        assert theirs.found() == []
    finally:
        path.unlink()
        ours.remove()
        theirs.remove()


def test_a_port_that_is_still_listened_on_is_named() -> None:
    traces = Traces()
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with process(traces, code) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        traces.note()
        traces.marker = "another"  # so that the process counts as gone and only its port gives it away
        assert traces.found() == [f"127.0.0.1:{port} is still listened on"]
    traces.marker = "none"
    assert traces.found() == []
    traces.remove()


@pytest.mark.parametrize(
    "line",
    [
        "[afd] ended by SIGKILL: ffn-0",
        "WARNING [shutdown] Executor: workers still running after SIGTERM; sending SIGKILL count=1",
        "WARNING [shutdown] Process manager: force killing remaining process EngineCore pid 7",
    ],
)
def test_a_clean_stop_that_needed_force_fails(line: str, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(f"serving\n{line}\n", encoding="utf-8")
    with pytest.raises(CaseFailed, match=r"server\.log says"), nothing_left(tmp_path):
        pass


def manager(second: int, what: str) -> str:
    return f"[attention-0] INFO 11-30 16:59:{second:02} [utils.py:1] [shutdown] Process manager: {what}"


def test_a_force_that_comes_with_its_sigterm_found_the_process_ended() -> None:
    asked, force = "send sigterm to process EngineCore", "force killing remaining process EngineCore pid 7"
    assert list(forced([manager(3, asked), manager(4, force)])) == []
    late = [manager(3, asked), manager(8, force)]
    assert list(forced(late)) == late[1:]
    assert list(forced([manager(3, force)])) == [manager(3, force)]


def test_the_failure_of_the_case_itself_is_the_one_that_is_told() -> None:
    case = nothing_left()
    (case.__enter__().folder / "left").touch()
    own = ZeroDivisionError()
    assert not case.__exit__(ZeroDivisionError, own, None)  # neither swallowed nor replaced
