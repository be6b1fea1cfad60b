# SPDX-License-Identifier: Apache-2.0
"""Workers of one tensor-parallel world end together when one of them dies.

The others wait for the dead one inside a collective, where SIGTERM reaches no Python. vLLM's executor gives them its
whole grace for a clean end before it kills them, and only then says that anything has happened: half a minute in which
nobody is told and no successor can start.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess

GRACE_S = 1.0
"""How long the others may take to see it by themselves and to say what they know."""

_LOOK_S = 1.0


class Companions:
    """Watches ``processes`` from a thread of its own until :meth:`close`; for one process there is none to end."""

    def __init__(self, processes: Sequence[BaseProcess], grace_s: float = GRACE_S) -> None:
        self._processes = tuple(processes)
        self._grace_s = grace_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if len(self._processes) > 1:
            self._thread = threading.Thread(target=self._run, name="afd-companions", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        by_sentinel = {process.sentinel: process for process in self._processes}
        ended: list[object] = []
        while not ended:
            ended = list(connection.wait(list(by_sentinel), _LOOK_S))
            if self._over.is_set():
                return
        if not self._over.wait(self._grace_s):
            self._end_others()

    def _end_others(self) -> None:
        dead = [process.name for process in self._processes if process.exitcode]
        left = [process for process in self._processes if process.is_alive()]
        if not dead:
            return  # those that ended did so in good order, and the others will
        for process in left:
            sys.stderr.write(
                f"AFD: {', '.join(dead)} died; ending {process.name}, which would wait for it.\n"
            )
            process.kill()

    def let_end(self) -> None:
        """The processes are asked to end, each by itself; safe in a signal handler."""
        self._over.set()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * _LOOK_S)
            self._thread = None
