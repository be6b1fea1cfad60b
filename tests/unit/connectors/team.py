# SPDX-License-Identifier: Apache-2.0
"""A team of processes, one per end of a data plane, that run the same scenario together.

Importing vLLM takes ten seconds of a core, so a fork server does it once and every process is a fork of it. A
team lives as long as its processes do; every scenario makes its own connectors. A scenario is a function of
:mod:`tests.unit.connectors.scenarios`, called in every process with its :class:`End`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

DEVICES = "AFD_CONTRACT_DEVICE"
"""Where the ends live: one device for all, or one for each (FFN first), separated by commas."""

START_S = 180.0
SCENARIO_S = 60.0
STOP_S = 5.0


@dataclass
class End:
    """What a scenario knows of its process: the lane, or None for the FFN, and the way to its peers."""

    lane: int | None
    lanes: int
    connection: Connection

    def share(self, data: dict[str, str] | None = None) -> dict[str, str]:
        """On the FFN: hand ``data`` to the lanes. On a lane: wait for it. Both return it."""
        if self.lane is None:
            self.connection.send(("offer", data))
            return dict(data or {})
        return self._next("offer")

    def meet(self, point: str) -> None:
        """Wait until every end is here."""
        self.connection.send(("meet", point))
        self._next("meet")

    def _next(self, kind: str) -> Any:
        if not self.connection.poll(SCENARIO_S):
            raise TimeoutError(f"no {kind} within {SCENARIO_S} s")
        seen, content = self.connection.recv()
        if seen != kind:
            raise RuntimeError(f"{seen} in the place of {kind}")
        return content


def _serve(lane: int | None, lanes: int, connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    devices = environment.get(DEVICES, "cpu").split(",")
    os.environ[DEVICES] = devices[(0 if lane is None else 1 + lane) % len(devices)]
    from tests.unit.connectors import device_scenarios, scenarios

    known = {**vars(scenarios), **vars(device_scenarios)}

    end = End(lane, lanes, connection)
    connection.send(("ready", None))
    while True:
        kind, content = connection.recv()
        if kind == "stop":
            return
        if kind in ("offer", "meet"):  # left over from a scenario that this end has given up
            continue
        name, arguments = content
        try:
            connection.send(("result", known[name](end, **arguments)))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            connection.send(("error", (type(error).__name__, str(error), traceback.format_exc())))


class ScenarioError(AssertionError):
    """An end raised; the message holds the traceback of every end that did."""


class Team:
    """The FFN and ``lanes`` lanes of one group, each a process."""

    def __init__(self, lanes: int, environment: Mapping[str, str]) -> None:
        self.lanes = lanes
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        try:
            self._start(dict(environment))
        except BaseException:  # a test's own time limit, for one: leave no process behind
            self.close()
            raise

    def _start(self, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.unit.connectors.preloaded"])
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # what the fork server imports vLLM with, if this is its first team
        try:
            for lane in (None, *range(self.lanes)):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                process = context.Process(
                    target=_serve, args=(lane, self.lanes, theirs, environment), daemon=True
                )
                process.start()
                self._processes.append(process)
                theirs.close()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value
        deadline = time.monotonic() + START_S
        for connection in self._connections:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"a member of the team did not start within {START_S} s")
            connection.recv()

    @property
    def whole(self) -> bool:
        """Whether every process is alive."""
        return all(process.is_alive() for process in self._processes)

    def run(self, scenario: str, dying: tuple[int, ...] = (), **arguments: Any) -> list[Any]:
        """Run ``scenario`` at every end; its results, FFN first. ``dying`` are ends expected to end their
        process.

        Raises ScenarioError with the tracebacks of the ends that raised, or with who is late.
        """
        for connection in self._connections:
            connection.send(("run", (scenario, arguments)))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        meeting: set[int] = set()
        deadline = time.monotonic() + SCENARIO_S
        ends = range(len(self._connections))
        while (open_ends := [i for i in ends if i not in results and i not in errors]) and not errors:
            remaining = deadline - time.monotonic()
            ready = wait([self._connections[i] for i in open_ends], max(0.0, remaining))
            if not ready:
                self.close()
                raise ScenarioError(f"{scenario}: ends {open_ends} did not finish within {SCENARIO_S} s")
            for index in (i for i in open_ends if self._connections[i] in ready):
                try:
                    kind, content = self._connections[index].recv()
                except EOFError:
                    if index not in dying:
                        errors[index] = "the process ended"
                    results[index] = None
                    continue
                if kind == "offer":
                    for lane in ends[1:]:
                        self._connections[lane].send(("offer", content))
                elif kind == "meet":
                    meeting.add(index)
                    if len(meeting) == len(self._connections):
                        meeting.clear()
                        for connection in self._connections:
                            connection.send(("meet", content))
                elif kind == "result":
                    results[index] = content
                else:
                    errors[index] = content[2]
        if errors:
            self.close()  # the other ends may be waiting for the one that raised
            raise ScenarioError("\n".join(f"end {index}: {text}" for index, text in errors.items()))
        return [results[index] for index in ends]

    def close(self) -> None:
        """End every process: at once those that wait for work, by force those that are stuck in a scenario."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(("stop", None))
        deadline = time.monotonic() + STOP_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join(STOP_S)
        for connection in self._connections:
            connection.close()
