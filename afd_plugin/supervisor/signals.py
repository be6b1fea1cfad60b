# SPDX-License-Identifier: Apache-2.0
"""The signals that ask a supervisor to stop, as events."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def leave_by_exit() -> None:
    """From now on SIGTERM and SIGHUP end this process as an exit does: what its contexts hold (servers, containers, a
    daemon) is ended first. For programs without a supervisor; only in the main thread.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


@contextlib.contextmanager
def stop_signals(deliver: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Deliver each stop signal until the block is left; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        deliver(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
