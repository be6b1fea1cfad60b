# SPDX-License-Identifier: Apache-2.0
"""The merged log: many children write, one stream comes out, and no child is ever held up by it.

Each child's output is drained by a thread of its own into a bounded queue; one thread writes the queue
out. When the outlet is slow, full or gone, lines are dropped and counted rather than kept, so a full disk
or a stalled terminal never blocks a child and never grows memory.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import IO

MAX_LINE_BYTES = 16_384
_QUEUE_LINES = 8_192


class LogSink:
    """Writes whole lines to one file descriptor from a thread of its own.

    Args:
        descriptor: Where lines go; it is not closed.
    """

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUE_LINES)
        self._lock = threading.Lock()
        self._dropped = 0
        self._lost = 0
        self._thread = threading.Thread(target=self._write_all, name="afd-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written, because the outlet was too slow or refused them."""
        with self._lock:
            return self._lost

    def line(self, prefix: str, text: str | bytes) -> None:
        """Queue one line as ``[prefix] text``; never blocks."""
        data = text.encode(errors="replace") if isinstance(text, str) else text
        try:
            self._queue.put_nowait(b"[" + prefix.encode() + b"] " + data + b"\n")
        except queue.Full:
            with self._lock:
                self._dropped += 1
                self._lost += 1

    def close(self, timeout: float = 2.0) -> None:
        """Write what is queued, for at most ``timeout`` seconds, and stop the thread."""
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return  # the outlet is stuck; the thread is a daemon and owns nothing
        self._thread.join(timeout)

    def _write_all(self) -> None:
        while True:
            data = self._queue.get()
            if data is None:
                return
            with self._lock:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                data = (
                    f"[afd] {dropped} log lines were dropped: the log outlet is too slow.\n".encode() + data
                )
            self._write(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:  # a closed pipe or a full disk: logs are lost, the service goes on
            with self._lock:
                self._lost += 1


def drain_lines(stream: IO[bytes], emit: Callable[[bytes], None]) -> None:
    """Read ``stream`` to its end and hand over each line without its terminator.

    Carriage returns end a line too (progress bars). A line longer than :data:`MAX_LINE_BYTES` is handed
    over in pieces, so that a child that never ends its line costs no memory.
    """
    rest = b""
    while True:
        chunk = os.read(stream.fileno(), 65_536)
        if not chunk:
            break
        *lines, rest = (rest + chunk.replace(b"\r", b"\n")).split(b"\n")
        for line in lines:
            if line:
                emit(line)
        while len(rest) > MAX_LINE_BYTES:
            emit(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
    if rest:
        emit(rest)
