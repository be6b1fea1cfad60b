# SPDX-License-Identifier: Apache-2.0
"""What remains when a supervisor is killed: a small process that then ends the supervisor's children.

A supervisor that gets SIGKILL can do nothing more, and the processes of vLLM do not all notice that
theirs is gone. So each supervisor starts one guardian, tells it the session of every child, and keeps a
pipe to it open. When the pipe closes without a farewell, the guardian ends these sessions and every
process that carries the supervisor's report socket in its environment, removes the supervisor's
directory, and ends.

Run as ``python -m afd_plugin.supervisor.guardian DIRECTORY TERMINATE_SECONDS`` with the pipe as standard
input.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil

from afd_plugin.report import REPORT_VARIABLE
from afd_plugin.supervisor.processes import end_all

_FAREWELL = b"done"


class Guardian:
    """The supervisor's handle on its guardian."""

    def __init__(self, directory: Path, terminate: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "afd_plugin.supervisor.guardian", str(directory), str(terminate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """Whether it still guards; a supervisor without a guardian should stop."""
        return self._process.poll() is None

    def watch(self, session: int) -> None:
        """Include the session led by process ``session``."""
        self._send(str(session).encode())

    def dismiss(self, timeout: float = 5.0) -> None:
        """Say farewell: nothing is left to guard. Idempotent."""
        self._send(_FAREWELL)
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
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


def guard(pipe: IO[bytes], directory: Path, terminate: float) -> int:
    """Read sessions from ``pipe`` until farewell (returns 0) or its end (ends them all and returns 1)."""
    sessions: set[int] = set()
    for line in pipe:
        word = line.strip()
        if word == _FAREWELL:
            return 0
        sessions.add(int(word))
    sessions |= _marked(directory)
    killed = end_all(sessions, terminate)
    shutil.rmtree(directory, ignore_errors=True)
    sys.stderr.write(
        "afd: the launcher was killed; its processes were ended"
        + (f", by SIGKILL: {', '.join(killed)}" if killed else "")
        + ".\n"
    )
    return 1


def _main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return guard(sys.stdin.buffer, Path(sys.argv[1]), float(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(_main())
