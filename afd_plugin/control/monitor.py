# SPDX-License-Identifier: Apache-2.0
"""The monitor thread: heartbeats, aborts and farewells between neighbours, beside the step path.

Neighbours form a tree: attention lanes hang on their FFN group, FFN groups on group 0. Each inner member
listens for its children at its *hub*; each but the root dials its parent by its *uplink*. A failure that one
member sees is passed on to all its other neighbours, so it reaches every member with its first cause.

A peer is lost when its connection closes without a farewell (seen at once, also after ``kill -9``) or when it
has been silent for ``silence_timeout_s`` (a stopped process, a dead link). Heartbeats come from a Python
thread: they prove that the process lives and its GIL is free now and then, not that its main thread makes
progress. Long torch operations release the GIL; a C call that keeps it for ``silence_timeout_s`` looks dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import zmq

from afd_plugin.config import LinkSettings, Role
from afd_plugin.control import messages as m
from afd_plugin.control.neighbours import Neighbour, Neighbourhood, Neighbours
from afd_plugin.control.sockets import received
from afd_plugin.control.statistics import Statistics
from afd_plugin.errors import (
    AFDError,
    PeerAborted,
    PeerLost,
    PeerShutDown,
    RendezvousTimeout,
    by_name,
)

logger = logging.getLogger(__name__)

FAREWELL_GRACE_S = 0.1
"""How long after a connection closed its farewell may still be on its way through another connection."""

ACKNOWLEDGE_S = 0.5
"""How long an abort or a farewell waits for the neighbours to confirm it."""

JOIN_S = 5.0


class Monitor:
    """Owner of the monitor thread and of its sockets. All public methods may be called from any thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        me: m.MemberId,
        epoch: int,
        settings: LinkSettings,
        statistics: Statistics,
        neighbours: Neighbours,
    ) -> None:
        self.me = me
        self.left: frozenset[m.MemberId] = frozenset()
        self.finishing = False
        """Set by the owner once farewells of peers are expected."""
        self._epoch = epoch
        self._settings = settings
        self._interval = min(settings.heartbeat_interval_s, settings.failure_timeout_s / 5)
        self._statistics = statistics
        self._net = Neighbourhood(me, epoch, statistics, neighbours)
        self._lock = threading.Lock()
        self._failure: AFDError | None = None
        self._callbacks: list[Callable[[AFDError], None]] = []
        self._established = threading.Event()
        self._confirmed = threading.Event()
        self._orders: deque[Callable[[], None]] = deque()
        self.wake, self._waker = _pair(context, f"inproc://wake-{id(self)}")
        self._bell, self._ringer = _pair(context, f"inproc://bell-{id(self)}")
        now = time.monotonic()
        self._sequence = 0
        self._next_beat = now
        self._quiet = False
        self._confirm_by: float | None = None
        self._stopping = False
        self._callbacks_due = False
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name=f"afd-control-{me}", daemon=True)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the thread; the sockets of ``neighbours`` belong to it from now on."""
        self._thread.start()

    @property
    def failure(self) -> AFDError | None:
        """The first failure seen, or ``None``."""
        return self._failure

    def check(self) -> None:
        """Raise the recorded failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def wait_established(self, timeout_s: float) -> None:
        """Wait until every neighbour is attached.

        Raises:
            RendezvousTimeout: A neighbour did not attach in time.
            AFDError: A failure was recorded meanwhile.
        """
        done = self._established.wait(timeout_s)
        self.check()
        if not done:
            missing = ", ".join(self._net.name(p.id) for p in self._net.peers.values() if not p.attached)
            raise RendezvousTimeout(
                f"{self.me} waited {timeout_s:.0f} s for the heartbeat connection with {missing}; "
                "its address must be reachable from here, through any firewall or container between."
            )

    def on_failure(self, callback: Callable[[AFDError], None]) -> None:
        """Call ``callback`` from the monitor thread on the first failure; at once if it is known."""
        with self._lock:
            if self._failure is None or self._callbacks_due:
                self._callbacks.append(callback)
                return
        callback(self._failure)

    def abort(
        self, error: str, reason: str, traceback_tail: Sequence[str] = (), wait_s: float = ACKNOWLEDGE_S
    ) -> None:
        """Tell all neighbours of this member's failure; returns when they confirmed, or after ``wait_s``."""
        message = m.Abort(
            self._epoch, self.me, error, m.clip_text(reason), m.clip_traceback(tuple(traceback_tail))
        )
        if self._order(partial(self._send_abort, message)) and threading.current_thread() is not self._thread:
            self._confirmed.wait(wait_s)

    def stop(self) -> None:
        """Say farewell, end the thread and release its sockets; bounded by about a second.

        Not for callbacks: a thread cannot wait for its own end.
        """
        self.finishing = True
        if self._thread.ident is None:
            self._release()
        elif self._order(self._say_farewell):
            self._thread.join(JOIN_S)
        for socket in (self.wake, self._ringer):
            socket.close(0)

    def _order(self, action: Callable[[], None]) -> bool:
        """Have the thread run ``action``; false when it does not run (any more)."""
        with self._lock:
            if not self._thread.is_alive() or self._ringer.closed:
                return False
            self._orders.append(action)
            with suppress(zmq.Again):  # it has ended meanwhile: nobody is left to tell
                self._ringer.send(b"", zmq.NOBLOCK)
        return True

    # ------------------------------------------------------------------ monitor thread

    def _run(self) -> None:
        try:
            for socket in (self._bell, *self._net.sockets()):
                self._poller.register(socket, zmq.POLLIN)
            while not (self._stopping and self._all_confirmed()):
                due = self._due()
                self._poller.poll(max(0, round((due - time.monotonic()) * 1000) + 1))
                self._turn(due)
        except Exception as error:
            logger.exception("The control plane's monitor thread of %s failed", self.me)
            self._fail(AFDError(f"The control plane's monitor thread of {self.me} failed: {error!r}."), None)
        finally:
            self._run_callbacks()
            self._release()

    def _turn(self, due: float) -> None:
        while received(self._bell) is not None:
            pass
        while self._orders:
            self._orders.popleft()()
        for peer, message in self._net.receive():
            self._handle(peer, message)
        self._net.drain_events()
        if self._net.all_attached():
            self._established.set()
        now = time.monotonic()
        self._forgive_own_stall(now, now - due)
        self._judge(now)
        if now >= self._next_beat:
            self._beat(now)
        if self._all_confirmed():
            self._run_callbacks()

    def _forgive_own_stall(self, now: float, stall: float) -> None:
        """Where this thread itself did not run in time, what peers sent meanwhile may still be on its way."""
        if stall > self._interval:
            for peer in self._net.peers.values():
                peer.last_seen = min(now, peer.last_seen + stall)

    def _due(self) -> float:
        moments = [self._next_beat]
        if self._confirm_by is not None:
            moments.append(self._confirm_by)
        if self._net.attach_due:
            moments.append(time.monotonic() + 0.01)
        for peer in self._watchable():
            moments.append(peer.last_seen + self._settings.silence_timeout_s)
            if peer.lost_at is not None:
                moments.append(peer.lost_at + FAREWELL_GRACE_S)
        return min(moments)

    def _watchable(self) -> Iterable[Neighbour]:
        return () if self._quiet or self.finishing else (p for p in self._net.peers.values() if not p.left)

    def _beat(self, now: float) -> None:
        self._next_beat = now + self._interval
        self._sequence += 1
        for peer in self._net.peers.values():
            if peer.attached and not peer.left:
                self._net.send(peer, m.Heartbeat(self._epoch, self._sequence))
                self._statistics.heartbeats_sent += 1
            self._statistics.last_seen_age_s[str(peer.id)] = now - peer.last_seen

    def _judge(self, now: float) -> None:
        for peer in self._watchable():
            if peer.lost_at is not None and now >= peer.lost_at + FAREWELL_GRACE_S:
                self._fail(
                    _lost(peer, f"{self._net.name(peer.id)} is gone: its connection to {self.me} closed."),
                    None,
                )
            elif now >= peer.last_seen + self._settings.silence_timeout_s:
                self._fail(_lost(peer, self._silence(peer)), None)
        for peer in self._net.peers.values():
            if peer.needed_until is not None and now >= peer.needed_until and not self.finishing:
                self._fail(
                    PeerShutDown(f"{self._net.name(peer.id)} has shut down, but {self.me} was not told to."),
                    None,
                )

    def _silence(self, peer: Neighbour) -> str:
        settings = self._settings
        seconds = f"{settings.silence_timeout_s:g} s (AFD_FAILURE_TIMEOUT={settings.failure_timeout_s:g})"
        if not peer.attached:
            return f"{self._net.name(peer.id)} opened no heartbeat connection to {self.me} within {seconds}."
        return (
            f"{self._net.name(peer.id)} has been silent for {seconds}: "
            f"its process is stopped or overloaded, or the link to {self.me} is down."
        )

    def _handle(self, peer: Neighbour, message: m.Message) -> None:
        if isinstance(message, m.Heartbeat):
            self._statistics.heartbeats_received += 1
        elif isinstance(message, m.Abort):
            self._net.send(peer, m.AbortSeen(self._epoch))
            self._fail(_failure_of(message, self._net.name(message.origin)), peer, message)
        elif isinstance(message, m.Farewell):
            self._on_farewell(peer)
        elif isinstance(message, m.AbortSeen | m.FarewellSeen):
            peer.confirmed = True
        else:
            self._statistics.dropped["unexpected"] += 1

    def _on_farewell(self, peer: Neighbour) -> None:
        self._net.send(peer, m.FarewellSeen(self._epoch))
        peer.left = True
        self.left = self.left | {peer.id}
        if peer.id.role is Role.FFN and not self.finishing:
            if self.me.role is Role.ATTENTION:
                self._fail(
                    PeerShutDown(f"{self._net.name(peer.id)} has shut down while {self.me} still needs it."),
                    peer,
                )
            else:
                peer.needed_until = time.monotonic() + self._settings.drain_timeout_s
        self._wake()

    def _fail(self, error: AFDError, source: Neighbour | None, relayed: m.Abort | None = None) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            self._callbacks_due = True
        logger.error("%s", error.line())
        self._wake()
        self._established.set()
        message = relayed or m.Abort(self._epoch, self.me, error.name, m.clip_text(str(error)))
        self._send_abort(message, source)

    def _send_abort(self, message: m.Abort, source: Neighbour | None = None) -> None:
        self._quiet = True
        self._send_and_confirm(message, source)

    def _say_farewell(self) -> None:
        self._stopping = True
        self._send_and_confirm(m.Farewell(self._epoch), None)

    def _send_and_confirm(self, message: m.Abort | m.Farewell, source: Neighbour | None) -> None:
        self._confirm_by = time.monotonic() + ACKNOWLEDGE_S
        for peer in self._net.peers.values():
            peer.confirmed = peer is source or not peer.attached or peer.left or peer.lost_at is not None
            if not peer.confirmed:
                self._net.send(peer, message)

    def _all_confirmed(self) -> bool:
        if self._confirm_by is None:
            return True
        done = all(p.confirmed for p in self._net.peers.values()) or time.monotonic() >= self._confirm_by
        if done:
            self._confirm_by = None
            self._confirmed.set()
        return done

    def _run_callbacks(self) -> None:
        with self._lock:
            if not self._callbacks_due or self._failure is None:
                return
            self._callbacks_due = False
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self._failure)
            except Exception:
                logger.exception("A failure callback of %s failed", self.me)

    def _wake(self) -> None:
        with suppress(zmq.Again):  # it has not looked at an earlier call yet
            self._waker.send(b"", zmq.NOBLOCK)

    def _release(self) -> None:
        self._net.release()
        self._waker.close(0)
        self._bell.close(0)


def _failure_of(message: m.Abort, origin: str) -> AFDError:
    kind = by_name(message.error)
    if kind is PeerLost or kind is PeerShutDown or kind is RendezvousTimeout:
        return kind(message.reason)
    aborted = PeerAborted(f"{origin} failed: {message.reason}", message.reason, message.traceback_tail)
    aborted.may_return = message.origin.role is Role.FFN and (kind is None or kind.exit_code == 1)
    return aborted


def _lost(peer: Neighbour, reason: str) -> PeerLost:
    error = PeerLost(reason)
    error.may_return = peer.id.role is Role.FFN
    return error


def _pair(context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Two connected in-process sockets: one to poll, one to ring."""
    end, ringer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    end.bind(name)
    ringer.connect(name)
    return end, ringer
