# SPDX-License-Identifier: Apache-2.0
"""A request to end that cannot get lost.

vLLM's worker answers SIGTERM by raising ``SystemExit`` once. Where that happens to be raised inside a finaliser, and a
collection of a freshly imported vLLM runs thousands of them, Python prints it and goes on, and the next SIGTERM finds
the request already made. So the request is kept as well, and the worker looks at it where it may end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class Termination:
    """Stands before the handler of SIGTERM that it finds; does nothing where there is none, or off the main thread."""

    def __init__(self) -> None:
        self._asked = False
        found = signal.getsignal(signal.SIGTERM)
        if not callable(found) or threading.current_thread() is not threading.main_thread():
            return
        before: Handler = found

        def note(number: int, frame: FrameType | None) -> None:
            self._asked = True
            before(number, frame)

        signal.signal(signal.SIGTERM, note)

    def check(self) -> None:
        """Raise ``SystemExit`` if this process has been asked to end and goes on."""
        if self._asked:
            raise SystemExit
