# SPDX-License-Identifier: Apache-2.0
"""What a supervisor is asked to run and what became of it: frozen values only."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class RestartPolicy:
    """How often a child may be started again, and how long it may take.

    Attributes:
        window: Seconds from a failure until the child must be ready again.
        limit: Failures within ``10 * window`` seconds after which no further start is tried.
        env: Variables that a child has when it is started again, over those of its first start.
    """

    window: float
    limit: int = 5
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def period(self) -> float:
        """Seconds after which a failure is forgotten."""
        return 10 * self.window


@dataclass(frozen=True)
class ChildSpec:
    """One child to start.

    Args:
        name: Unique; the prefix of its log lines, for example ``attention-0``.
        argv: Program and arguments; never a shell line.
        env: The child's whole environment.
        ready_phase: The phase (see :mod:`afd_plugin.report`) whose arrival makes the child ready.
        stop_order: On a clean stop, children with a lower number are told first; the ones with the
            highest number are expected to end by themselves once the others are gone (they are told
            in-band) and get a signal only if they do not. Children of one number stop together.
        scratch: Environment variable to folder name: an empty folder of the child's own, made for this start
            below the supervisor's and removed with it, whatever happens.
        restart: Whether the child is started again when it fails while the service is complete; None: never.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    ready_phase: str = "serving"
    stop_order: int = 0
    scratch: Mapping[str, str] = field(default_factory=dict)
    restart: RestartPolicy | None = None


@dataclass(frozen=True)
class TimeLimits:
    """Bounds on every wait of a supervisor, in seconds.

    Attributes:
        startup: From start to ready, all children.
        failure: From a fault to its end: a stopped process is found and ended, and the others have had
            the chance to answer their clients, within this bound.
        drain: From a request to stop until the children have ended by themselves.
        terminate: From SIGTERM to SIGKILL for what outlives a clean stop.
        probe: Between two looks at the children.
    """

    startup: float = 1800.0
    failure: float = 10.0
    drain: float = 90.0
    terminate: float = 10.0
    probe: float = 1.0

    @property
    def answer(self) -> float:
        """From a fault until the children must have answered their clients and ended by themselves."""
        return 0.4 * self.failure

    @property
    def patience(self) -> float:
        """How long the supervisor itself may stay stopped before its guardian ends everything."""
        return 0.3 * self.failure

    @property
    def give_up(self) -> float:
        """From SIGTERM to SIGKILL after a fault: what is left of ``failure`` but for finding and for ending."""
        return 0.15 * self.failure


@dataclass(frozen=True)
class Fault:
    """One reason why the service cannot go on.

    ``error`` is an error name (:mod:`afd_plugin.errors`) or what was observed (``child-died``,
    ``child-stopped``); ``exit_code`` is what the launcher returns when this fault is the cause.
    """

    child: str
    error: str
    message: str
    exit_code: int = 1


@dataclass(frozen=True)
class Outcome:
    """How a supervised run ended.

    Attributes:
        exit_code: 0 for a clean end, else the cause's.
        cause: The fault that began it, if any.
        killed: Processes that had to be ended by SIGKILL.
        asked_to_stop: Whether a signal asked for the end.
    """

    exit_code: int
    cause: Fault | None = None
    killed: tuple[str, ...] = ()
    asked_to_stop: bool = False


_REFUSED, _TIMEOUT, _PEER = 2, 4, 3


def choose_cause(faults: tuple[Fault, ...]) -> Fault | None:
    """The fault that best explains the end of a service.

    Faults arrive in the order in which they were noticed, and one fault makes others: inside a child the
    processes above a failed worker fail in turn, and the peer of a process that died reports a lost peer.
    So of each child only the first fault with a sentence of its own counts; that its engine has failed says
    no more than to look elsewhere, and a bare death less, whichever of its processes was heard first. Among
    children a refusal explains everything else; then a fault of a process's own; then a
    rendezvous that timed out; a lost peer explains the least. It names the process that went, though, which an
    engine's failure does not, so it is quoted there.
    """
    first: dict[str, tuple[int, Fault]] = {}
    for index, fault in enumerate(faults):
        known = first.get(fault.child)
        if known is None or _telling(fault) > _telling(known[1]):
            first[fault.child] = (index, fault)
    rank = {_REFUSED: 0, _TIMEOUT: 2, _PEER: 3}
    ordered = sorted(first.values(), key=lambda item: (rank.get(item[1].exit_code, 1), item[0]))
    if not ordered:
        return None
    cause = ordered[0][1]
    lost = next((fault for fault in faults if fault.child != cause.child and fault.exit_code == _PEER), None)
    if cause.error != "engine-failed" or lost is None:
        return cause
    return replace(cause, message=f"{cause.message} {lost.child} saw: {lost.message}")


def _telling(fault: Fault) -> int:
    """How much a fault says about its child: a death, that vLLM's engine failed, or what made it fail."""
    return {"child-died": 0, "engine-failed": 1}.get(fault.error, 2)


def describe_exit(name: str, returncode: int) -> str:
    """A sentence for an exit status as :class:`subprocess.Popen` reports it."""
    if returncode < 0:
        try:
            what = signal.Signals(-returncode).name
        except ValueError:
            what = f"signal {-returncode}"
        return f"{name} was ended by {what}."
    return f"{name} exited with code {returncode}."
