# SPDX-License-Identifier: Apache-2.0
"""Tells a worker at once that the process which started it has died.

vLLM's own monitor of a worker's parent ends the worker's message queues, which a worker notices only when it looks
at them, and takes SIGTERM's effect away. A worker that serves inside one long call would serve on until SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing import connection


class ParentWatch:
    """Calls ``on_death`` once, from a thread of its own, when the parent process ends; costs nothing until then.

    Does nothing in a process that multiprocessing did not start.
    """

    def __init__(self, on_death: Callable[[int], None]) -> None:
        self._on_death = on_death
        self._parent = multiprocessing.parent_process()
        self._wake_end, self._wake = os.pipe()
        self._thread: threading.Thread | None = None
        if self._parent is not None:
            self._thread = threading.Thread(target=self._run, name="afd-parent-watch", daemon=True)
            self._thread.start()

    def parent_died(self) -> bool:
        """Whether the parent has ended."""
        return self._parent is not None and not self._parent.is_alive()

    def _run(self) -> None:
        parent = self._parent
        if parent is None or parent.pid is None:
            return
        # Its bound is the life of the process: a parent that dies and close() both end it.
        ready = connection.wait([parent.sentinel, self._wake_end])
        if self._wake_end not in ready:
            self._on_death(parent.pid)

    def close(self) -> None:
        """End the thread; idempotent."""
        if self._thread is None:
            return
        os.write(self._wake, b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._thread = None
