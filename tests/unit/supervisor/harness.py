# SPDX-License-Identifier: Apache-2.0
"""A supervisor run over small Python children, and what these may wait for."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from afd_plugin.supervisor.processes import members_of
from afd_plugin.supervisor.sink import LogSink
from afd_plugin.supervisor.spec import ChildSpec, Outcome, TimeLimits
from afd_plugin.supervisor.supervisor import Details, Supervisor

LIMITS = TimeLimits(startup=20.0, failure=2.0, drain=15.0, terminate=1.0, probe=0.2)

PRELUDE = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from afd_plugin import report
from afd_plugin.errors import ConfigRefused, PeerLost
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
def until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, 'what this child waits for has not come'
        time.sleep(0.02)
def complete():
    until(Path(os.environ['RUN_COMPLETE']).exists)
def logged(text):
    until(lambda: text in Path(os.environ['RUN_LOG']).read_text())
"""
SERVE = "report.phase('serving')\nstop.wait()\n"


def child(name: str, body: str, order: int = 0) -> ChildSpec:
    code = PRELUDE + textwrap.dedent(body)
    return ChildSpec(name, (sys.executable, "-u", "-c", code), dict(os.environ), stop_order=order)


class Run:
    """One supervised run with its log, and what was ready.

    In a child's body ``complete()`` waits until the supervisor knows that every child serves, and ``logged(text)``
    until its log says so: what comes next then comes later, on a host of any speed.
    """

    def __init__(self, tmp_path: Path, *specs: ChildSpec, limits: TimeLimits = LIMITS) -> None:
        self.ready: list[Mapping[str, Details]] = []
        self.path = tmp_path / "log"
        self.complete = tmp_path / "complete"
        told = {"RUN_COMPLETE": str(self.complete), "RUN_LOG": str(self.path)}
        specs = tuple(replace(spec, env={**spec.env, **told}) for spec in specs)
        with open(self.path, "wb") as outlet:
            sink = LogSink(outlet.fileno())
            self.supervisor = Supervisor(specs, limits, sink, self.on_ready)
            self.outcome: Outcome = self.supervisor.run()
            sink.close()
        self.log = self.path.read_text()

    def on_ready(self, details: Mapping[str, Details]) -> None:
        self.ready.append(details)
        self.complete.touch()

    def left(self) -> list[psutil.Process]:
        return members_of(int(line.rsplit(" ", 1)[1]) for line in self.log.splitlines() if "started" in line)
