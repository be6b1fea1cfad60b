# SPDX-License-Identifier: Apache-2.0
"""A worker that was asked to end ends, even where Python drops the exception that should have ended it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from afd_plugin.v1.worker.termination import Termination

PROGRAM = """
import os, signal
from afd_plugin.v1.worker.termination import Termination

def native(number, frame):
    raise SystemExit

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # the handler runs between two of these
            pass

signal.signal(signal.SIGTERM, native)
termination = Termination()
termination.check()
Finalised()
print("went on", flush=True)
termination.check()
print("never said", flush=True)
"""


def test_a_request_that_a_finaliser_swallows_is_obeyed_at_the_next_look() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    assert "Exception ignored in" in done.stderr


def test_the_handler_that_was_there_is_still_called() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        termination = Termination()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            termination.check()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_without_a_handler_nothing_is_installed() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        Termination().check()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
