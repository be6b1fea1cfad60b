# SPDX-License-Identifier: Apache-2.0
"""Holds an attention lane's step while a failed FFN is started again, and puts new planes in the place of the old.

Three threads meet here. The monitor thread of the control plane says that the FFN is gone (:meth:`Recovery.failed`);
a thread of its own waits until the worker's main thread has left the old planes, closes them, knocks at the rendezvous
until the FFN is back or the window has passed, agrees with the other lanes on where to go on
(:mod:`~afd_plugin.v1.worker.resume`), and announces that; the main thread uses planes only inside :meth:`Recovery.use`,
which waits meanwhile, and after an error asks :meth:`Recovery.lost` whether to try the same call again.

Every wait is bounded: leaving the old planes by ``grace_s``, everything until the new ones serve by ``window_s``.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

from afd_plugin.config import Role
from afd_plugin.connectors.base import AFDConnector
from afd_plugin.control import AttentionControl, Membership
from afd_plugin.errors import (
    AFDError,
    ControlClosed,
    FingerprintMismatch,
    NotResumable,
    PeerFailure,
    ProtocolVersionMismatch,
    UnknownMember,
)
from afd_plugin.v1.worker.resume import POSITION_KEY, Action, Progress, decide, positions_of
from afd_plugin.v1.worker.verdict import PATIENCE_S

logger = logging.getLogger(f"vllm.{__name__}")

RETRY_S = 0.2
CLOSE_S = 2.0
_HOPELESS = (FingerprintMismatch, ProtocolVersionMismatch, UnknownMember, NotResumable)
"""What another attempt cannot mend."""


@dataclass(frozen=True)
class Planes:
    """One life of the FFN as a lane's leader is connected to it."""

    control: AttentionControl
    connector: AFDConnector
    membership: Membership

    def close(self) -> None:
        """Release both."""
        self.connector.close()
        self.control.close()


Rejoin: TypeAlias = Callable[[Mapping[str, str], float, threading.Event, Planes], Planes]
"""Meets the peers again: what to tell them, seconds left, when to give up, and the planes before."""


class State(Enum):
    """What the main thread may do."""

    SERVING = "serving"
    RECOVERING = "recovering"
    ENDED = "ended"
    CLOSED = "closed"


_E = TypeVar("_E", bound=BaseException)


class Recovery:
    """One lane's planes over the lives of its FFN.

    Args:
        planes: The first ones, connected; they belong to the calling thread, as all later ones will.
        progress: How far the lane is; written by the main thread inside :meth:`use` only.
        rejoin: Makes new planes.
        window_s: From the loss of an FFN until its successor must serve.
        grace_s: From that loss until the main thread must have left the old planes.
        on_planes: Called with new planes before they are used.
        on_end: Called once with the error for which there is no way on.
    """

    def __init__(
        self,
        planes: Planes,
        progress: Progress,
        rejoin: Rejoin,
        window_s: float,
        grace_s: float,
        on_planes: Callable[[Planes], None],
        on_end: Callable[[AFDError], None],
    ) -> None:
        self.progress = progress
        self._planes = planes
        self._owner = planes.control.owner
        self._rejoin = rejoin
        self._window_s = window_s
        self._grace_s = grace_s
        self._on_planes = on_planes
        self._on_end = on_end
        self._changed = threading.Condition()
        self._state = State.SERVING
        self._busy = False
        self._error: AFDError | None = None
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ main thread

    @contextmanager
    def use(self) -> Iterator[Planes]:
        """The planes, once they serve; nobody closes them before the block is left.

        Raises:
            AFDError: There is no way on.
        """
        with self._changed:
            self._await_serving()
            self._busy = True
            planes = self._planes
        try:
            yield planes
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def lost(self, planes: Planes, error: PeerFailure) -> None:
        """Returns when ``planes``, which failed with ``error``, have been replaced; else raises what ends the lane.

        The data plane notices a loss first; without the control plane's word within half a second it is no loss.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._state is not State.SERVING or self._planes is not planes, PATIENCE_S
            )
            if self._state is State.SERVING and self._planes is planes:
                raise error
            self._await_serving()

    def check(self) -> None:
        """Raise what has ended the lane, if anything has; a loss that may be mended is none."""
        if self._error is not None:
            raise self._error

    def verdict(self, error: _E) -> _E | AFDError:
        """What has ended the lane, where that explains ``error``."""
        return self._error if self._error is not None and isinstance(error, PeerFailure) else error

    def close(self) -> None:
        """The lane ends in good order: no recovery begins or goes on. The present planes stay open."""
        with self._changed:
            self._state = State.CLOSED
            self._changed.notify_all()
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _await_serving(self) -> None:
        bound = self._window_s + 2 * self._grace_s
        if not self._changed.wait_for(lambda: self._state is not State.RECOVERING, bound):
            raise ControlClosed(f"The recovery from a lost FFN did not come to an end within {bound:g} s.")
        if self._error is not None:
            raise self._error
        if self._state is State.CLOSED:
            raise ControlClosed("The lane has been closed.")

    # ------------------------------------------------------------------ monitor thread

    def failed(self, error: AFDError) -> None:
        """The control plane's callback: begin to recover, or end."""
        if not (isinstance(error, PeerFailure) and error.may_return):
            self._end(error)
            return
        with self._changed:
            if self._state is not State.SERVING:
                return
            self._state = State.RECOVERING
            self._thread = threading.Thread(target=self._run, args=(error,), name="afd-recovery", daemon=True)
            self._changed.notify_all()
            self._thread.start()

    def _end(self, error: AFDError) -> None:
        with self._changed:
            if self._state in (State.ENDED, State.CLOSED):
                return
            self._state, self._error = State.ENDED, error
            self._changed.notify_all()
        self._on_end(error)

    # ------------------------------------------------------------------ recovery thread

    def _run(self, cause: PeerFailure) -> None:
        try:
            self._recover(cause, time.monotonic() + self._window_s)
        except AFDError as error:
            self._end(error)
        except Exception as error:
            logger.exception("AFD: the recovery from a lost FFN failed")
            self._end(AFDError(f"The recovery from a lost FFN failed: {error!r}"))

    def _recover(self, cause: PeerFailure, deadline: float) -> None:
        logger.warning(
            "AFD: %s Requests are held for up to %g s while it is started again.", cause, self._window_s
        )
        before = self._planes
        before.connector.abort()
        with self._changed:
            left = self._changed.wait_for(lambda: not self._busy, self._grace_s)
        if not left or not self.progress.can_go_on:
            raise cause
        before.close()
        while not self._cancelled.is_set() and (seconds := deadline - time.monotonic()) > 0:
            planes = self._attempt(seconds, before)
            if planes is not None and self._adopt(planes):
                return
            self._cancelled.wait(RETRY_S)
        raise expired(cause, self._window_s)

    def _attempt(self, left: float, before: Planes) -> Planes | None:
        """New planes on which the interrupted step goes on; None when there is no FFN yet, or it was lost again."""
        planes = None
        try:
            planes = self._rejoin({POSITION_KEY: str(self.progress.position)}, left, self._cancelled, before)
            connector = planes.connector
            # ends a replay whose FFN is lost again
            planes.control.on_failure(lambda error: connector.abort())
            self._go_on(planes)
        except _HOPELESS:
            if planes is not None:
                planes.close()
            raise
        except (AFDError, OSError, RuntimeError) as error:
            logger.warning("AFD: not connected to an FFN again yet: %s", str(error).partition("\n")[0])
            if planes is not None:
                planes.close()
            return None
        return planes

    def _go_on(self, planes: Planes) -> None:
        """Take up the interrupted step, as far as that is not the main thread's to do."""
        lanes = [member for member in planes.membership.members if member.id.role is Role.ATTENTION]
        resumption = decide(self.progress, positions_of([member.data for member in lanes]))
        logger.info("AFD: resuming at exchange %d: %s", self.progress.position, resumption.action.value)
        if resumption.plan is None:
            return
        planes.control.announce(resumption.plan)
        sent = self.progress.last
        if resumption.action is Action.REPLAY and sent is not None:
            planes.connector.send_hidden(sent.exchange, sent.unit, sent.hidden, sent.router_logits)
            planes.connector.recv_output(sent.exchange, sent.hidden.shape[0])

    def _adopt(self, planes: Planes) -> bool:
        planes.control.hand_over(self._owner)
        with self._changed:
            usable = self._state is State.RECOVERING and not planes.control.failed
            if usable:
                self._on_planes(planes)
                self._planes, self._state = planes, State.SERVING
                self._changed.notify_all()
        if not usable:
            planes.close()
            return False
        logger.warning("AFD: connected to the FFN again, epoch %d.", planes.membership.epoch)
        planes.control.on_failure(self.failed)
        return True


def expired(cause: PeerFailure, window_s: float) -> PeerFailure:
    """``cause``, and that nobody came back."""
    error = copy.copy(cause)
    error.message = f"{cause.message} No FFN came back within {window_s:g} s (AFD_FFN_RESTART_WINDOW)."
    error.may_return = False
    return error
