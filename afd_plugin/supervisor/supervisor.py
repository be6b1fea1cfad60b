# SPDX-License-Identifier: Apache-2.0
"""Start children, watch them until one of them or a signal ends it all, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil

from afd_plugin.report import REPORT_VARIABLE, SOURCE_VARIABLE, STOPPING_NAME
from afd_plugin.supervisor.child import Child
from afd_plugin.supervisor.guardian import Guardian
from afd_plugin.supervisor.inbox import Report, ReportInbox
from afd_plugin.supervisor.processes import describe, end_all, members_of, stopped, wait_gone
from afd_plugin.supervisor.sink import LogSink
from afd_plugin.supervisor.spec import ChildSpec, Fault, Outcome, TimeLimits, choose_cause, describe_exit

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PROGRESS_SECONDS = 15.0
_MEMBERS_EVERY = 5  # probes between two full listings of processes, once the service is ready
_OWN = "afd"

_MAX_FOLDER = 107 - 41
"""A socket's path has at most 107 bytes; vLLM puts sockets with names of 36 into its temporary folder."""

STATE_NAME = "state.json"
"""File in the supervisor's directory (``afd-*`` among the temporary files) with the children's phases."""

Details = Mapping[str, str | int | float]
_Event = tuple[Child, int] | Report | signal.Signals


class Supervisor:
    """Runs children until they end.

    A child that ends with 0 without having been asked to brings the others to a clean stop. A child that
    fails, a process of a child that is stopped (SIGSTOP), or a failure report (:mod:`afd_plugin.report`)
    is a fault: the others get a part of ``limits.failure`` to answer their clients and end by themselves,
    then they are ended. The first SIGTERM, SIGINT or SIGHUP begins a clean stop in ``stop_order``, the
    second one ends everything at once.

    Args:
        specs: The children; at least one, names unique.
        limits: Bounds on all waits.
        sink: Receives the children's lines and the supervisor's own.
        on_ready: Called once, from :meth:`run`, with each child's name and the details of its ready phase.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        limits: TimeLimits,
        sink: LogSink,
        on_ready: Callable[[Mapping[str, Details]], None] = lambda details: None,
    ) -> None:
        names = [spec.name for spec in specs]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a supervisor needs children with unique names, not {names}")
        self._specs = tuple(specs)
        self._limits = limits
        self._sink = sink
        self._on_ready = on_ready
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._ready: dict[str, Details] = {}
        self._details: dict[str, dict[str, str | int | float]] = {}
        self._state_file: Path | None = None
        self._faults: list[Fault] = []
        self._killed: list[str] = []
        self._asked = 0
        self._draining = False
        self._known: list[psutil.Process] = []
        self._serving: dict[int, str] = {}
        self._suspects: set[int] = set()
        self._probes = 0

    def run(self) -> Outcome:
        """Start the children and return when nothing of them is left. Call it once, from the main thread."""
        with self._directory() as directory, contextlib.ExitStack() as stack:
            guardian = Guardian(directory, self._limits.give_up, self._limits.patience)
            stack.callback(guardian.dismiss)
            self._state_file = directory / STATE_NAME
            inbox = ReportInbox(directory, self._events.put)
            stack.callback(inbox.close)
            stack.enter_context(self._signals())
            try:
                self._start(inbox.path, guardian)
                self._watch(guardian)
                if self._draining and not self._faults:
                    (directory / STOPPING_NAME).touch()
                    self._drain()
            finally:
                self._finish()
        cause = choose_cause(tuple(self._faults))
        code = cause.exit_code if cause else 0
        return Outcome(code, cause, tuple(self._killed), bool(self._asked))

    # ------------------------------------------------------------------ resources

    @staticmethod
    @contextlib.contextmanager
    def _directory() -> Iterator[Path]:
        name = tempfile.mkdtemp(prefix="afd-")
        if len(name) > _MAX_FOLDER:
            os.rmdir(name)
            name = tempfile.mkdtemp(prefix="afd-", dir="/tmp")
        try:
            yield Path(name)
        finally:
            shutil.rmtree(name, ignore_errors=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._events.put(signal.Signals(number))

        before = {number: signal.signal(number, note) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, report_path: Path, guardian: Guardian) -> None:
        # vLLM leaves its rendezvous file and sockets behind when a start fails; here they go with the directory.
        shared = {REPORT_VARIABLE: str(report_path), "TMPDIR": str(report_path.parent)}
        for spec in self._specs:
            env = {**spec.env, **shared, SOURCE_VARIABLE: spec.name}
            for variable, name in spec.scratch.items():
                folder = report_path.parent / f"{spec.name}-{name}"
                folder.mkdir()
                env[variable] = str(folder)
            child = Child(replace(spec, env=env), self._sink, lambda one, code: self._events.put((one, code)))
            guardian.watch(child.session)
            self._children.append(child)
            self._say(f"started {spec.name} as process {child.session}")

    # ------------------------------------------------------------------ the loop

    def _watch(self, guardian: Guardian) -> None:
        begun = time.monotonic()
        progress = begun + _PROGRESS_SECONDS
        next_probe = begun + self._limits.probe
        while any(child.running for child in self._children) and not self._faults and not self._draining:
            now = time.monotonic()
            if now >= next_probe:
                next_probe = now + self._limits.probe
                self._probe(guardian)
            starting = len(self._ready) < len(self._children)
            if starting and now >= progress:
                progress = now + _PROGRESS_SECONDS
                self._say(f"still starting after {now - begun:.0f} s: {self._phases()}")
            if starting and now - begun > self._limits.startup:
                self._fault(
                    _OWN,
                    "startup-timeout",
                    f"The service was not ready within {self._limits.startup:.0f} s ({self._phases()}); "
                    "raise --startup-timeout if loading takes longer.",
                    4,
                )
            self._handle(next_probe - time.monotonic())
        if self._faults:
            answers_owed = len(self._ready) == len(self._children)
            self._await_in_band(self._limits.answer if answers_owed else 1.0)

    def _handle(self, timeout: float) -> None:
        """Wait for one event for at most ``timeout`` seconds and take note of it."""
        try:
            event = self._events.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return
        if isinstance(event, signal.Signals):
            self._asked += 1
            self._draining = True
            self._say(f"{event.name} received: " + ("stopping" if self._asked == 1 else "ending at once"))
        elif isinstance(event, Report):
            self._note_report(event)
        else:
            self._note_exit(*event)

    def _note_report(self, report: Report) -> None:
        child = next((one for one in self._children if one.name == report.source), None)
        if child is None:
            return
        if report.error:
            self._fault(child.name, report.error, report.message, report.exit_code)
            return
        child.phase = report.phase
        self._details.setdefault(child.name, {}).update(report.details)
        self._publish()
        if not self._draining:
            self._say(f"{child.name}: {report.phase}")
        if report.phase == child.spec.ready_phase and child.name not in self._ready:
            self._ready[child.name] = report.details
            if len(self._ready) == len(self._children):
                self._serving = {process.pid: describe(process) for process in self._members()}
                self._on_ready(self._ready)

    def _note_exit(self, child: Child, code: int) -> None:
        self._say(describe_exit(child.name, code))
        if code == 0 or (child.asked_to_stop and code == -signal.SIGTERM):
            self._draining = True  # -SIGTERM: asked before the child could install its handler
            return
        fault_code = code if code in (2, 3, 4) else 1
        self._fault(child.name, "child-died", describe_exit(child.name, code), fault_code)

    def _fault(self, child: str, error: str, message: str, code: int = 1) -> None:
        ended = self._ended() if not self._faults else ""
        if ended:
            message = f"{message} Processes that had ended by then: {ended}."
        self._faults.append(Fault(child, error, message, code))
        self._say(f"{child} failed: {error}: {message}")

    def _members(self) -> list[psutil.Process]:
        return members_of(child.session for child in self._children)

    def _ended(self) -> str:
        """Those of the processes that served which are gone: what died first is among them, whoever reports it.

        A child itself is not: its end has a fault of its own.
        """
        if not self._serving:
            return ""
        alive = {process.pid for process in self._members()} | {child.session for child in self._children}
        return ", ".join(name for pid, name in self._serving.items() if pid not in alive)

    def _probe(self, guardian: Guardian) -> None:
        """Look for stopped processes; one seen stopped twice in a row is ended, since nothing else ends
        it.
        """
        if not guardian.alive():
            self._fault(
                _OWN,
                "guardian-died",
                "The guardian process of this launcher was ended or stopped by somebody.",
            )
            return
        if len(self._ready) < len(self._children) or self._probes % _MEMBERS_EVERY == 0:
            self._known = self._members()
        self._probes += 1
        found = stopped(self._known)
        for process in found:
            if process.pid in self._suspects:
                owner = self._owner(process)
                what = describe(process)
                self._killed.append(what)
                with contextlib.suppress(psutil.Error):
                    process.kill()
                self._fault(
                    owner, "process-stopped", f"Process {what} of {owner} was stopped; it has been ended."
                )
        self._suspects = {process.pid for process in found}

    def _owner(self, process: psutil.Process) -> str:
        for child in self._children:
            if any(member.pid == process.pid for member in members_of([child.session])):
                return child.name
        return _OWN

    # ------------------------------------------------------------------ endings

    def _await_in_band(self, timeout: float) -> None:
        """After a fault: let the children notice it by themselves and answer their clients."""
        deadline = time.monotonic() + timeout
        while any(child.running for child in self._children) and self._asked < 2:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._handle(left)

    def _drain(self) -> None:
        """A clean stop: signal the first children, give later ones the time to be told in-band, all
        bounded.
        """
        deadline = time.monotonic() + self._limits.drain
        if len(self._ready) < len(self._children):
            self._stop_starting(deadline)
            orders: list[int] = []
        else:
            orders = sorted({child.spec.stop_order for child in self._children})
        for position, order in enumerate(orders):
            group = [child for child in self._children if child.spec.stop_order == order]
            if position:
                self._wait_for(group, min(deadline, time.monotonic() + self._limits.drain / 3))
            for child in group:
                if child.running and not self._faults and self._asked < 2:
                    self._say(f"asking {child.name} to stop")
                    child.ask_to_stop()
            self._wait_for(group, deadline)
            if self._faults or self._asked > 1:
                break
        running = [child.name for child in self._children if child.running]
        if running and not self._faults and self._asked < 2:
            self._fault(
                _OWN,
                "drain-timeout",
                f"{', '.join(running)} did not stop in {self._limits.drain:.0f} s; raise --drain-timeout.",
            )
        elif self._faults and self._asked < 2:
            self._await_in_band(self._limits.answer)

    def _stop_starting(self, deadline: float) -> None:
        """Stop a service that serves nobody yet: every process is told, since nothing is in flight and a
        worker that still starts hears of its parent's end only after it has loaded.
        """
        for child in self._children:
            if child.running:
                self._say(f"asking {child.name} to stop")
                child.ask_to_stop()
        roots = {child.session for child in self._children}
        for process in members_of(roots):
            if process.pid not in roots:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
        self._wait_for(self._children, deadline)

    def _wait_for(self, group: Sequence[Child], deadline: float) -> None:
        while any(child.running for child in group) and not self._faults and self._asked < 2:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._handle(min(left, self._limits.probe))

    def _finish(self) -> None:
        """Whatever happened before: leave no process of any child, and say what that took."""
        sessions = [child.session for child in self._children]
        clean = not self._faults and not any(child.running for child in self._children)
        if clean:
            wait_gone(sessions, self._limits.terminate)
        if self._asked > 1 and any(child.running for child in self._children):
            self._fault(
                _OWN, "interrupted", "A second signal ended the service before its clean stop was done."
            )
        killed = end_all(sessions, self._limits.terminate if clean else self._limits.give_up)
        if killed:
            self._killed.extend(killed)
            self._say(f"had to end by SIGKILL: {', '.join(killed)}")
            if not self._faults:
                self._fault(_OWN, "unclean-stop", f"Ended by SIGKILL: {', '.join(killed)}.")
        for child in self._children:
            child.close()
        with contextlib.suppress(queue.Empty):  # what the last moments brought, for the verdict
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Report) and event.error:
                    self._note_report(event)

    def _publish(self) -> None:
        """Leave what is known about the children where `afd status` finds it."""
        if self._state_file is None:
            return
        children = {
            child.name: {
                "pid": child.session,
                "phase": child.phase,
                **self._details.get(child.name, {}),
            }
            for child in self._children
        }
        partial = self._state_file.with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk costs the glance, not the service
            partial.write_text(json.dumps({"pid": os.getpid(), "children": children}))
            partial.replace(self._state_file)

    def _phases(self) -> str:
        waiting = [child for child in self._children if child.name not in self._ready]
        return ", ".join(f"{child.name} ({child.phase})" for child in waiting)

    def _say(self, text: str) -> None:
        self._sink.line(_OWN, text)
