# SPDX-License-Identifier: Apache-2.0
"""The receiving end of :mod:`afd_plugin.report`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from afd_plugin.report import MAX_REPORT_BYTES


@dataclass(frozen=True)
class Report:
    """One decoded report. ``phase`` is set for a phase, ``error`` for a failure."""

    source: str
    pid: int
    phase: str = ""
    details: dict[str, str | int | float] = field(default_factory=dict)
    error: str = ""
    message: str = ""
    exit_code: int = 1


def decode_report(data: bytes) -> Report | None:
    """Decode one datagram; anything malformed is ``None``, since whoever can reach the socket may write
    to it.
    """
    try:
        raw = json.loads(data)
    except ValueError:
        return None
    if not isinstance(raw, dict):
        return None
    source, pid, kind = raw.get("source"), raw.get("pid"), raw.get("kind")
    if not isinstance(source, str) or not isinstance(pid, int):
        return None
    if kind == "phase":
        name, details = raw.get("phase"), raw.get("details")
        if not isinstance(name, str) or not isinstance(details, dict):
            return None
        plain = {str(key): value for key, value in details.items() if isinstance(value, str | int | float)}
        return Report(source, pid, phase=name, details=plain)
    if kind == "failure":
        error, message, code = raw.get("error"), raw.get("message"), raw.get("exit_code")
        if isinstance(error, str) and isinstance(message, str) and isinstance(code, int) and 0 < code < 256:
            return Report(source, pid, error=error, message=message, exit_code=code)
    return None


class ReportInbox:
    """Owns a datagram socket in ``directory`` and hands each report to ``deliver`` from a thread of its own.

    Args:
        directory: An existing directory that only this user may enter.
        deliver: Called with each well-formed report; must not block.
    """

    def __init__(self, directory: Path, deliver: Callable[[Report], None]) -> None:
        self.path = directory / "report"
        self._deliver = deliver
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="afd-reports", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while not self._closing.is_set():
            data = self._socket.recv(MAX_REPORT_BYTES)
            report = decode_report(data)
            if report is not None:
                self._deliver(report)

    def close(self) -> None:
        """Stop the thread and remove the socket; idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            waker.settimeout(1.0)
            waker.sendto(b"{}", str(self.path))
        self._thread.join(2.0)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
