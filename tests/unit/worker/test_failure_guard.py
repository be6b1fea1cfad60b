# SPDX-License-Identifier: Apache-2.0
"""The end of a worker whose main thread is stuck; in a process of its own, which the guard ends."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from afd_plugin.errors import PeerLost

WORKER = """
import sys, threading, time
from afd_plugin.errors import PeerLost
from afd_plugin.v1.worker.failure_guard import FailureGuard
guard = FailureGuard(lambda: time.sleep({abort_s}), grace_s=0.5)
print("began", flush=True)
threading.Thread(target=guard.failed, args=(PeerLost("the peer is gone."),), daemon=True).start()
time.sleep(60)
"""


@pytest.mark.parametrize("abort_s", [0, 60])
def test_a_stuck_worker_ends_after_the_grace_however_long_the_abort_takes(abort_s: int) -> None:
    """NCCL's abort waits for kernels that wait for the peer."""
    worker = subprocess.Popen([sys.executable, "-c", WORKER.format(abort_s=abort_s)], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        while worker.stdout.readline() not in (b"began\n", b""):
            pass
        began = time.monotonic()
        assert worker.wait(30) == PeerLost.exit_code
        assert time.monotonic() - began < 5
    finally:
        worker.kill()
        worker.communicate()
