# SPDX-License-Identifier: Apache-2.0
"""What remains when a supervisor is killed: a small process that then ends the supervisor's children.

A supervisor that gets SIGKILL can do nothing more, and the processes of vLLM do not all notice that
theirs is gone. So each supervisor starts one guardian, tells it the session of every child, and keeps a
pipe to it open. When the pipe closes without a farewell, the guardian ends these sessions and every
process that carries the supervisor's report socket in its environment, removes the supervisor's
directory, and ends. A supervisor that stays stopped (SIGSTOP, Ctrl-Z) watches nobody and lets the pipes
of its children's logs fill up until they block, so the guardian kills it after a while, to the same effect.

Run as ``python -m afd_plugin.supervisor.guardian DIRECTORY TERMINATE_SECONDS PATIENCE_SECONDS`` with the pipe
as standard input.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from afd_plugin.report import REPORT_VARIABLE
from afd_plugin.supervisor.processes import end_all

_FAREWELL = b"done"
_LOOK_S = 1.0


class Guardian:
    """The supervisor's handle on its guardian.

    Args:
        directory: The supervisor's directory.
        terminate: From SIGTERM to SIGKILL, in seconds.
        patience: How long the supervisor may stay stopped, in seconds.
    """

    def __init__(self, directory: Path, terminate: float, patience: float) -> None:
        words = [sys.executable, "-m", "afd_plugin.supervisor.guardian"]
        self._process = subprocess.Popen(
            [*words, str(directory), str(terminate), str(patience)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """Whether it still guards; a supervisor without a guardian should stop."""
        if self._process.poll() is not None:
            return False
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status() != psutil.STATUS_STOPPED
        return False

    def watch(self, session: int) -> None:
        """Include the session led by process ``session``."""
        self._send(str(session).encode())

    def dismiss(self, timeout: float = 5.0) -> None:
        """Say farewell: nothing is left to guard. Idempotent."""
        self._send(_FAREWELL)
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout if self.alive() else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout)

    def _send(self, word: bytes) -> None:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        try:
            pipe.write(word + b"\n")
            pipe.flush()
        except BrokenPipeError:
            return  # alive() tells


def _marked(directory: Path) -> set[int]:
    """Sessions of all processes whose environment names a report socket in ``directory``."""
    path = str(directory / "report")
    sessions = set()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(REPORT_VARIABLE) == path:
                sessions.add(os.getsid(process.pid))
        except (psutil.Error, OSError):
            continue  # another user's process, or one that has just ended
    sessions.discard(os.getsid(0))
    return sessions


def _words(pipe: int, supervisor: int, patience: float) -> Iterator[bytes]:
    """The supervisor's words until its pipe closes; kills it when it stays stopped for ``patience`` seconds."""
    rest = b""
    stopped_since: float | None = None
    while True:
        if select.select([pipe], [], [], _LOOK_S)[0]:
            chunk = os.read(pipe, 4096)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            continue
        if not _is_stopped(supervisor):
            stopped_since = None
            continue
        stopped_since = stopped_since or time.monotonic()
        if time.monotonic() - stopped_since >= patience:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def guard(pipe: int, supervisor: int, directory: Path, terminate: float, patience: float) -> int:
    """Read sessions from ``pipe`` until farewell (returns 0) or its end (ends them all and returns 1)."""
    sessions: set[int] = set()
    for word in _words(pipe, supervisor, patience):
        if word == _FAREWELL:
            return 0
        sessions.add(int(word))
    sessions |= _marked(directory)
    killed = end_all(sessions, terminate)
    shutil.rmtree(directory, ignore_errors=True)
    sys.stderr.write(
        "afd: the launcher was killed, or stopped for too long; its processes were ended"
        + (f", by SIGKILL: {', '.join(killed)}" if killed else "")
        + ".\n"
    )
    return 1


def _main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    directory, terminate, patience = sys.argv[1:4]
    return guard(sys.stdin.fileno(), os.getppid(), Path(directory), float(terminate), float(patience))


if __name__ == "__main__":
    sys.exit(_main())
