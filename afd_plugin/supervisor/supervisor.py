# SPDX-License-Identifier: Apache-2.0
"""Start children, watch them until one of them or a signal ends it all, and leave nothing behind."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from afd_plugin.errors import DrainTimeout, EngineGone
from afd_plugin.report import LEAVING, REPORT_VARIABLE, SOURCE_VARIABLE, STOPPING_NAME
from afd_plugin.supervisor.child import Child
from afd_plugin.supervisor.folder import fresh_scratch, working_folder, write_state
from afd_plugin.supervisor.guardian import Guardian
from afd_plugin.supervisor.inbox import Report, ReportInbox
from afd_plugin.supervisor.losses import Losses
from afd_plugin.supervisor.processes import describe, end_all, members_of, stopped, wait_gone
from afd_plugin.supervisor.restarts import Revivals
from afd_plugin.supervisor.signals import stop_signals
from afd_plugin.supervisor.sink import LogSink
from afd_plugin.supervisor.spec import ChildSpec, Fault, Outcome, TimeLimits, choose_cause, describe_exit

_PROGRESS_SECONDS = 15.0
_MEMBERS_EVERY = 5  # probes between two full listings of processes, once the service is ready
_OWN = "afd"
_REFUSED = 2

Details = Mapping[str, str | int | float]
_Event = tuple[Child, int] | Report | signal.Signals


class Supervisor:
    """Runs children until they end.

    A child that ends with 0 without having been asked to brings the others to a clean stop, unless within
    ``limits.failure`` one of them ends with an error of its own. A child that fails, a process of a child that
    is stopped (SIGSTOP), or a failure report (:mod:`afd_plugin.report`) is a fault: the others get a part of
    ``limits.failure`` to answer their clients and end by themselves, then they are ended. A child with a restart
    policy that fails while the service is complete is no fault yet: once nothing of it is left it is started
    again, and only if it is not ready within its window is what made it fail the fault of the service. The first
    SIGTERM, SIGINT or SIGHUP begins a clean stop in ``stop_order``, the second one ends everything at once.

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
        self._folder = Path()
        self._revivals = Revivals(limits.answer)
        self._faults: list[Fault] = []
        self._killed: list[str] = []
        self._asked = 0
        self._draining = False
        self._known: list[psutil.Process] = []
        self._serving: dict[int, str] = {}
        self._suspects: set[int] = set()
        self._losses = Losses(limits.answer)
        self._probes = 0

    def run(self) -> Outcome:
        """Start the children and return when nothing of them is left. Call it once, from the main thread."""
        with working_folder() as directory, contextlib.ExitStack() as stack:
            guardian = Guardian(directory, self._limits.give_up, self._limits.patience)
            stack.callback(guardian.dismiss)
            self._folder = directory
            inbox = ReportInbox(directory, self._events.put)
            stack.callback(inbox.close)
            stack.enter_context(stop_signals(self._events.put))
            try:
                for spec in self._specs:
                    self._children.append(self._start(spec, guardian))
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

    def _start(self, spec: ChildSpec, guardian: Guardian) -> Child:
        again = self._revivals.count(spec.name)
        # vLLM leaves its rendezvous file and sockets behind when a start fails; here they go with the directory.
        shared = {REPORT_VARIABLE: str(self._folder / "report"), "TMPDIR": str(self._folder)}
        env = {**spec.env, **shared, SOURCE_VARIABLE: f"{spec.name}+{again}" if again else spec.name}
        env.update(fresh_scratch(self._folder, spec.name, spec.scratch))
        if again and spec.restart is not None:
            env.update(spec.restart.env)
        child = Child(replace(spec, env=env), self._sink, lambda one, code: self._events.put((one, code)))
        guardian.watch(child.session)
        self._say(f"started {spec.name} as process {child.session}")
        return child

    # ------------------------------------------------------------------ the loop

    def _watch(self, guardian: Guardian) -> None:
        begun = time.monotonic()
        progress = begun + _PROGRESS_SECONDS
        next_probe = begun + self._limits.probe
        while (self._revivals or self._any_running()) and not self._faults and not self._draining:
            now = time.monotonic()
            self._revive(guardian, now)
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
        if self._draining and not self._asked and not self._faults:
            # An FFN leaves in good order when attention says so, and vLLM's executor makes it say so where its engine
            # fails, too; its HTTP server looks for a dead engine every five seconds, and has the word until then.
            self._wait_for(self._children, time.monotonic() + self._limits.failure)
        if (
            self._draining
            and not self._faults
            and any(self._revivals.ending(one.name) for one in self._children)
        ):
            self._faults.extend(self._revivals.faults())  # nobody is left to answer what is in flight
        if self._faults:
            answers_owed = len(self._ready) == len(self._children)
            self._await_in_band(self._limits.answer if answers_owed else 1.0)

    def _any_running(self) -> bool:
        return any(child.running for child in self._children)

    def _revive(self, guardian: Guardian, now: float) -> None:
        """Start again what has failed and may be, once nothing of it is left."""
        for name in self._revivals.overdue(now):
            self._say(f"{name} has not come back in time")
            self._faults.extend(self._revivals.faults())
            return
        for position, child in enumerate(self._children):
            if self._revivals.due(child.name, child.running, now):
                killed = end_all([child.session], self._limits.give_up)
                self._say(
                    f"{child.name} has ended" + (f", by SIGKILL: {', '.join(killed)}" if killed else "")
                )
                child.close()
                self._children[position] = self._start(self._specs[position], guardian)
                self._revivals.started(child.name)

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
        # A child that was started again has another source than the one before it, whose last words may still come.
        child = next((one for one in self._children if one.spec.env[SOURCE_VARIABLE] == report.source), None)
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
        if report.phase == child.spec.ready_phase and (revival := self._revivals.ready(child.name)):
            self._serving = {process.pid: describe(process) for process in self._members()}
            self._say(f"{child.name} serves again {time.monotonic() - revival.since:.1f} s after its failure")
        if report.phase == child.spec.ready_phase and child.name not in self._ready:
            self._ready[child.name] = report.details
            if len(self._ready) == len(self._children):
                self._serving = {process.pid: describe(process) for process in self._members()}
                self._on_ready(self._ready)

    def _note_exit(self, child: Child, code: int) -> None:
        if child not in self._children:
            return
        self._say(describe_exit(child.name, code))
        if self._revivals.ending(child.name):
            return
        if code == 0 or (child.asked_to_stop and code == -signal.SIGTERM):
            self._draining = True  # -SIGTERM: asked before the child could install its handler
            return
        fault_code = code if code in (2, 3, 4) else 1
        self._fault(child.name, "child-died", describe_exit(child.name, code), fault_code)

    def _fault(self, child: str, error: str, message: str, code: int = 1) -> None:
        ended = self._ended() if not self._faults else ""
        if ended:
            message = f"{message} Processes that had ended by then: {ended}."
        fault = Fault(child, error, message, code)
        self._say(f"{child} failed: {error}: {message}")
        spec = next((one for one in self._specs if one.name == child), None)
        complete = len(self._ready) == len(self._children) and not self._faults and not self._draining
        if spec is not None and self._revivals.absorb(spec, fault, complete, time.monotonic()):
            return
        if not self._faults and code != _REFUSED:
            self._faults.extend(self._revivals.faults())
        self._faults.append(fault)

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
        it. And for engine processes that are gone while their child goes on as if it could still answer.
        """
        if not guardian.alive():
            self._fault(
                _OWN,
                "guardian-died",
                "The guardian process of this launcher was ended or stopped by somebody.",
            )
            return
        starting = len(self._ready) < len(self._children) or bool(self._revivals)
        if starting or self._losses.seen or self._probes % _MEMBERS_EVERY == 0:
            self._known = self._members()
            leaving = any(child.phase == LEAVING for child in self._children)
            serving = {} if starting or leaving else self._serving
            lost = self._losses.overdue(serving, {process.pid for process in self._known}, time.monotonic())
            if lost and not self._faults:
                what = f"{lost} ended, and what it belonged to went on without it."
                self._fault(_OWN, EngineGone.name, what)
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
        while self._any_running() and self._asked < 2 and (left := deadline - time.monotonic()) > 0:
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
                DrainTimeout.name,
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
        clean = not self._faults and not self._any_running()
        if clean:
            wait_gone(sessions, self._limits.terminate)
        if self._asked > 1 and self._any_running():
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
        children = {
            child.name: {
                "pid": child.session,
                "phase": child.phase,
                "restarts": self._revivals.count(child.name),
                **self._details.get(child.name, {}),
            }
            for child in self._children
        }
        write_state(self._folder, children)

    def _phases(self) -> str:
        waiting = [child for child in self._children if child.name not in self._ready]
        return ", ".join(f"{child.name} ({child.phase})" for child in waiting)

    def _say(self, text: str) -> None:
        self._sink.line(_OWN, text)
