# SPDX-License-Identifier: Apache-2.0
"""Bounds what a worker does after its peer is lost.

The control plane's monitor thread calls :meth:`FailureGuard.failed`. The main thread usually raises by itself, because
its wait ends with the peer's connection; vLLM then reports the error upwards. If it is stuck in a wait that cannot be
interrupted, or idle, the guard ends the process: vLLM's executor watches worker processes, so the engine fails its
requests and the service ends, rather than wait for a peer that will not answer.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from vllm.logger import init_logger

from afd_plugin import report
from afd_plugin.errors import AFDError

logger = init_logger(__name__)

GRACE_S = 1.0
"""How long the main thread may take to raise on its own before the process is ended."""


class FailureGuard:
    """Ends the process within a bound after a failure, unless it ends cleanly first."""

    def __init__(self, abort: Callable[[], None], grace_s: float = GRACE_S) -> None:
        self._abort = abort
        self._grace_s = grace_s
        self._disarmed = threading.Event()

    def failed(self, error: AFDError) -> None:
        """Record ``error`` with the launcher, unblock the data plane, and end the process a grace after this call."""
        if self._disarmed.is_set():
            return
        logger.error("AFD: %s", error.line())
        report.failure(error)
        # first, because an abort of NCCL can take seconds of its own
        threading.Thread(target=self._end, args=(error,), name="afd-failure-guard", daemon=True).start()
        self._abort()

    def disarm(self) -> None:
        """The process is ending on its own; nothing needs to be forced any more."""
        self._disarmed.set()

    def _end(self, error: AFDError) -> None:
        if not self._disarmed.wait(self._grace_s):
            logger.error("AFD: the worker did not end by itself within %.1f s; ending it.", self._grace_s)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.exit_code)
