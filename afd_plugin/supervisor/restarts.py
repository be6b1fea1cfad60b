# SPDX-License-Identifier: Apache-2.0
"""Whether a child that failed is started again, and what is known of it until it serves again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from afd_plugin.supervisor.spec import ChildSpec, Fault, RestartPolicy

_OWN_FAULT = 1
"""The exit code of a fault of a child's own; 2 is a refusal, 3 a lost peer, 4 peers that were not found."""


@dataclass
class Revival:
    """A child between its failure and being ready again; times by ``time.monotonic()``.

    Attributes:
        since: When it failed first.
        faults: Everything that was reported of it since; the cause, should it not come back.
        started: Whether its successor runs.
        end_by: When what is left of a failed child is ended.
    """

    since: float
    faults: list[Fault]
    end_by: float
    started: bool = False


def may_restart(policy: RestartPolicy, failures: Sequence[float], now: float, exit_code: int) -> bool:
    """Whether a child is started again that failed at ``now`` with ``exit_code``, after earlier ``failures``.

    Only for a fault of its own: what was refused would be refused again, and an FFN without its peers is of no use.
    """
    recent = sum(now - moment < policy.period for moment in failures)
    return exit_code == _OWN_FAULT and recent < policy.limit


class Revivals:
    """The children that have failed and are started again, and how often that was; no processes, no clock.

    Args:
        answer_s: From a failure until what is left of the child is ended.
    """

    def __init__(self, answer_s: float) -> None:
        self._answer_s = answer_s
        self._open: dict[str, Revival] = {}
        self._failures: dict[str, list[float]] = {}
        self._windows: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def faults(self) -> list[Fault]:
        """What is known against the children that have not come back."""
        return [fault for revival in self._open.values() for fault in revival.faults]

    def count(self, name: str) -> int:
        """How often ``name`` has failed and was started again since the service began, or is about to be."""
        return len(self._failures.get(name, ()))

    def absorb(self, spec: ChildSpec, fault: Fault, serving: bool, now: float) -> bool:
        """Whether ``fault`` leads to another start of its child, or belongs to a failure that has led to one.

        ``serving``: whether the service was complete and nobody has asked it to stop.
        """
        revival = self._open.get(spec.name)
        if revival is not None and not revival.started:
            revival.faults.append(fault)
            return True
        failures = self._failures.setdefault(spec.name, [])
        if spec.restart is None or not serving:
            return False
        if not may_restart(spec.restart, failures, now, fault.exit_code):
            return False
        failures.append(now)
        if revival is None:
            self._windows[spec.name] = spec.restart.window
            self._open[spec.name] = Revival(now, [fault], now + self._answer_s)
        else:
            revival.faults.append(fault)
            revival.started, revival.end_by = False, now + self._answer_s
        return True

    def ending(self, name: str) -> bool:
        """Whether ``name`` has failed and its end is expected."""
        return name in self._open and not self._open[name].started

    def due(self, name: str, running: bool, now: float) -> bool:
        """Whether to start ``name`` again now: it has ended, or had its time to end by itself."""
        return self.ending(name) and (not running or now >= self._open[name].end_by)

    def started(self, name: str) -> None:
        """Its successor runs."""
        self._open[name].started = True

    def ready(self, name: str) -> Revival | None:
        """``name`` is ready; what that brings to an end, if anything."""
        return None if self.ending(name) else self._open.pop(name, None)

    def overdue(self, now: float) -> Iterator[str]:
        """The children whose window has passed."""
        return (name for name, one in self._open.items() if now - one.since > self._windows[name])
