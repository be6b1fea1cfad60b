# SPDX-License-Identifier: Apache-2.0
"""Members of a real control plane on loopback, in threads or, where death matters, processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from afd_plugin.config import LinkSettings
from afd_plugin.control import AttentionControl, FFNControl, Fingerprint
from afd_plugin.plan import RemoteUnit, StepKind, StepPlan, UnitKind
from afd_plugin.topology import Topology

TOKEN = "a token of the tests"
PATIENCE_S = 30.0
"""How long a test waits for something that should take milliseconds."""

FAST = LinkSettings(token=TOKEN, rendezvous_timeout_s=10, failure_timeout_s=5, drain_timeout_s=5)


def fingerprint(**changes: Any) -> Fingerprint:
    facts: dict[str, Any] = {
        "plugin_version": "0.28.0",
        "vllm_version": "0.28.0",
        "model_config_hash": "c0ffee",
        "dtype": "torch.bfloat16",
        "hidden_size": 64,
        "units": tuple(
            RemoteUnit(i, f"model.layers.{i + 1}.mlp.experts", UnitKind.EXPERTS) for i in range(3)
        ),
        "max_tokens": 512,
    }
    return Fingerprint(**{**facts, **changes})


def plan(step: int, *tokens: int, kind: StepKind = StepKind.REAL, graph: bool = False) -> StepPlan:
    """A one-stage plan; ``tokens`` by lane."""
    return StepPlan(step, kind, tuple((count,) for count in tokens), graph)


class Party:
    """One member with a thread of its own, as its sockets need."""

    def __init__(self, control: AttentionControl | FFNControl) -> None:
        self.control: Any = control
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="party")

    def start(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._thread.submit(getattr(self.control, name), *args, **kwargs)

    def do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.start(name, *args, **kwargs).result(PATIENCE_S)

    def run(self, function: Callable[[], Any]) -> Any:
        return self._thread.submit(function).result(PATIENCE_S)

    def close(self) -> None:
        try:
            self.do("close")
        finally:
            self._thread.shutdown()


class Service:
    """All members of a topology, closed in any order at the end."""

    def __init__(self, topology: Topology, settings: LinkSettings) -> None:
        self.topology = topology
        self.settings = settings
        self.groups: list[Party] = []
        self.lanes: list[Party] = []
        self.peer = ""

    def start_group(self, group: int, settings: LinkSettings | None = None, **changes: Any) -> Future[Any]:
        """Start one FFN group's listen(); returns once its address is known."""
        party = Party(FFNControl())
        self.groups.append(party)
        bound: Future[str] = Future()
        result = party.start(
            "listen",
            replace(settings or self.settings, peer=self.peer),
            self.topology,
            group,
            fingerprint(**changes),
            {"store": f"store of {group}"},
            bound.set_result,
        )
        result.add_done_callback(lambda done: bound.done() or bound.set_result("never bound"))
        address = bound.result(PATIENCE_S)
        if group == 0:
            self.peer = address
        return result

    def start_lane(self, lane: int, settings: LinkSettings | None = None, **changes: Any) -> Future[Any]:
        party = Party(AttentionControl())
        self.lanes.append(party)
        own = settings or self.settings
        return party.start(
            "connect",
            own if own.peer else replace(own, peer=self.peer),
            self.topology,
            lane,
            fingerprint(**changes),
        )

    def ready(self) -> None:
        """Bring all members through the READY barrier."""
        parties = [*self.groups, *self.lanes]
        for party in parties:
            party.do("ready")
        for waiting in [party.start("wait_ready") for party in parties]:
            waiting.result(PATIENCE_S)

    def close(self) -> None:
        for party in [*self.lanes, *self.groups]:
            party.close()


@contextmanager
def meeting(topology: Topology = Topology(), settings: LinkSettings = FAST) -> Iterator[Service]:  # noqa: B008
    """A service whose members nobody has started yet."""
    service = Service(topology, settings)
    try:
        yield service
    finally:
        service.close()


@contextmanager
def serving(topology: Topology = Topology(), settings: LinkSettings = FAST) -> Iterator[Service]:  # noqa: B008
    """A service that has passed READY."""
    with meeting(topology, settings) as service:
        waiting = [service.start_group(0)]
        waiting += [service.start_group(group) for group in range(1, topology.ffn_members)]
        waiting += [service.start_lane(lane) for lane in range(topology.attention_dp)]
        for result in waiting:
            result.result(PATIENCE_S)
        service.ready()
        yield service


def failure_of(party: Party, timeout_s: float = PATIENCE_S) -> BaseException:
    """The failure that the monitor of ``party`` reports, however it learns of it."""
    seen: Future[BaseException] = Future()
    party.control.on_failure(seen.set_result)
    return seen.result(timeout_s)


def still_waiting(*results: Future[Any], for_s: float = 0.2) -> bool:
    """Whether all of ``results`` stay open for ``for_s`` seconds; returns as soon as one does not."""
    return not wait(results, for_s, "FIRST_COMPLETED").done


class Child:
    """A member in a process of its own, driven by method names over a pipe."""

    def __init__(self, kind: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_child, args=(kind, end), daemon=True)
        self._process.start()
        end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, name: str, *args: Any) -> None:
        self._pipe.send((name, args))

    def answer(self, timeout_s: float = PATIENCE_S) -> Any:
        assert self._pipe.poll(timeout_s), "the child did not answer"
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> int | None:
        self._pipe.close()
        self._process.join(PATIENCE_S)
        return self._process.exitcode


def _child(kind: str, pipe: Connection) -> None:
    control = AttentionControl() if kind == "attention" else FFNControl()
    threading.current_thread().name = kind
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        extra: Sequence[Any] = (pipe.send,) if name == "listen" else ()
        try:
            getattr(control, name)(*args, *extra)
            pipe.send(f"{name} done")
        except Exception as error:  # noqa: BLE001 - told to the test
            pipe.send(f"{type(error).__name__}: {error}")
