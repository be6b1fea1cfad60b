# SPDX-License-Identifier: Apache-2.0
"""One child process with the two threads that attend to it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable

from afd_plugin.supervisor.sink import LogSink, drain_lines
from afd_plugin.supervisor.spec import ChildSpec


class Child:
    """A started child: leader of a session of its own, its output drained into the log, its end reported.

    Args:
        spec: What to run.
        sink: Where its lines go, prefixed with its name.
        on_exit: Called once with the child and its return code, from a thread; must not block.
    """

    def __init__(self, spec: ChildSpec, sink: LogSink, on_exit: Callable[[Child, int], None]) -> None:
        self.spec = spec
        self.phase = "starting"
        self.returncode: int | None = None
        self.asked_to_stop = False
        self._on_exit = on_exit
        self._process = subprocess.Popen(
            spec.argv,
            env=dict(spec.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(
            target=self._drain, args=(sink,), name=f"afd-log-{spec.name}", daemon=True
        )
        self._waiter = threading.Thread(target=self._wait, name=f"afd-wait-{spec.name}", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def session(self) -> int:
        """The session id, which is the child's process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the child itself (not its descendants) is still there."""
        return self.returncode is None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the child itself; nothing happens when it has ended."""
        self.asked_to_stop = True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def close(self, timeout: float = 2.0) -> None:
        """Join both threads and close the pipe, after everything of this child has ended."""
        self._waiter.join(timeout)
        self._reader.join(timeout)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def _drain(self, sink: LogSink) -> None:
        stream = self._process.stdout
        assert stream is not None  # noqa: S101  (Popen was given a pipe; narrows the type)
        drain_lines(stream, lambda line: sink.line(self.spec.name, line))

    def _wait(self) -> None:
        # lint: allow waiting: this thread lives as long as the child, whose end the supervisor bounds
        returncode = self._process.wait()
        self.returncode = returncode
        self._on_exit(self, returncode)
