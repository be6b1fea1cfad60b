# SPDX-License-Identifier: Apache-2.0
"""The monitor thread: heartbeats, aborts and farewells between neighbours, beside the step path.

Neighbours form a tree: attention lanes hang on their FFN group, FFN groups on group 0. Each inner member (a *hub*)
listens for its children; each other member dials its parent (the *uplink*). A failure that one member sees is
passed on to all its other neighbours, so it reaches every member with its first cause.

A peer is lost when its connection closes without a farewell (seen at once, also after ``kill -9``) or when it has
been silent for ``failure_timeout_s`` (a stopped process, a dead link). Heartbeats come from a Python thread: they prove
that the process lives and that its GIL is free now and then, not that its main thread makes progress. Long torch
operations release the GIL; a C call that keeps it for ``failure_timeout_s`` looks like a dead process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import zmq

from afd_plugin.config import LinkSettings, Role
from afd_plugin.control import messages as m
from afd_plugin.control.sockets import DISCONNECTED, HANDSHAKE_DONE, HANDSHAKE_FOREIGN, Channel
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


@dataclass(frozen=True)
class Neighbours:
    """Whom a member hears: the sockets and the members behind them.

    Attributes:
        hub: Where children attach; ``None`` for a leaf.
        children: Members that must attach to the hub.
        uplink: The connection to ``parent``; ``None`` for the root.
        parent: The member behind the uplink.
        watched: Further dialled channel to ``parent``, whose loss is the loss of ``parent``.
        counted: Listening channels whose broken handshakes are counted.
        names: How members are called in messages: role, index, process, address.
    """

    hub: Channel | None = None
    children: tuple[m.MemberId, ...] = ()
    uplink: Channel | None = None
    parent: m.MemberId | None = None
    watched: Channel | None = None
    counted: tuple[Channel, ...] = ()
    names: Mapping[m.MemberId, str] = field(default_factory=dict)


@dataclass
class _Neighbour:
    id: m.MemberId
    last_seen: float
    identity: bytes = b""
    descriptor: int = -1
    attached: bool = False
    left: bool = False
    lost_at: float | None = None
    needed_until: float | None = None
    confirmed: bool = False


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
        self._net = neighbours
        self._lock = threading.Lock()
        self._failure: AFDError | None = None
        self._callbacks: list[Callable[[AFDError], None]] = []
        self._established = threading.Event()
        self._confirmed = threading.Event()
        self._orders: deque[Callable[[], None]] = deque()
        self.wake, self._waker = _pair(context, f"inproc://wake-{id(self)}")
        self._bell, self._ringer = _pair(context, f"inproc://bell-{id(self)}")
        now = time.monotonic()
        ids = [*neighbours.children, *([neighbours.parent] if neighbours.parent else [])]
        self._peers = {id_: _Neighbour(id_, now) for id_ in ids}
        self._by_identity: dict[bytes, _Neighbour] = {}
        self._sequence = 0
        self._next_beat = now
        self._quiet = False
        self._attach_due = False
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
            missing = ", ".join(self._name(p.id) for p in self._peers.values() if not p.attached)
            raise RendezvousTimeout(
                f"{self.me} waited {timeout_s:.0f} s for the heartbeat connection with {missing}; "
                "its address must be reachable from here, also where a firewall or a container stands between."
            )

    def on_failure(self, callback: Callable[[AFDError], None]) -> None:
        """Call ``callback`` from the monitor thread on the first failure; at once if it has already happened."""
        with self._lock:
            if self._failure is None or self._callbacks_due:
                self._callbacks.append(callback)
                return
        callback(self._failure)

    def abort(
        self, error: str, reason: str, traceback_tail: Sequence[str] = (), wait_s: float = ACKNOWLEDGE_S
    ) -> None:
        """Tell all neighbours that this member has failed; returns when they have confirmed it, or after ``wait_s``."""
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

    def _name(self, id_: m.MemberId) -> str:
        return self._net.names.get(id_, str(id_))

    # ------------------------------------------------------------------ monitor thread

    def _run(self) -> None:
        try:
            self._register()
            while not (self._stopping and self._all_confirmed()):
                due = self._due()
                self._poller.poll(max(0, round((due - time.monotonic()) * 1000) + 1))
                self._turn(due)
        except Exception as error:  # noqa: BLE001 - the thread must not end without a word
            logger.exception("The control plane's monitor thread of %s failed", self.me)
            self._fail(AFDError(f"The control plane's monitor thread of {self.me} failed: {error!r}."), None)
        finally:
            self._run_callbacks()
            self._release()

    def _register(self) -> None:
        sockets = [self._bell, *(channel.events for channel in self._net.counted)]
        if self._net.watched is not None:
            sockets.append(self._net.watched.events)
        for channel in (self._net.hub, self._net.uplink):
            if channel is not None:
                sockets += [channel.socket, channel.events]
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)

    def _turn(self, due: float) -> None:
        now = time.monotonic()
        stall = now - due
        if stall > self._interval:
            # This process itself did not run; what the peers sent meanwhile may still be on its way to us.
            for peer in self._peers.values():
                peer.last_seen += stall
        while _received(self._bell):
            pass
        while self._orders:
            self._orders.popleft()()
        self._drain_hub()
        self._drain_uplink()
        self._drain_events()
        self._judge(time.monotonic())
        if now >= self._next_beat:
            self._beat(now)
        if self._all_confirmed():
            self._run_callbacks()

    def _due(self) -> float:
        moments = [self._next_beat]
        if self._confirm_by is not None:
            moments.append(self._confirm_by)
        if self._attach_due:
            moments.append(time.monotonic() + 0.01)
        for peer in self._watchable():
            moments.append(peer.last_seen + self._settings.failure_timeout_s)
            if peer.lost_at is not None:
                moments.append(peer.lost_at + FAREWELL_GRACE_S)
        return min(moments)

    def _watchable(self) -> Iterable[_Neighbour]:
        return () if self._quiet or self.finishing else (p for p in self._peers.values() if not p.left)

    def _beat(self, now: float) -> None:
        self._next_beat = now + self._interval
        self._sequence += 1
        for peer in self._peers.values():
            if peer.attached and not peer.left:
                self._send(peer, m.Heartbeat(self._epoch, self._sequence))
                self._statistics.heartbeats_sent += 1
            self._statistics.last_seen_age_s[str(peer.id)] = now - peer.last_seen

    def _judge(self, now: float) -> None:
        for peer in self._watchable():
            if peer.lost_at is not None and now >= peer.lost_at + FAREWELL_GRACE_S:
                self._fail(
                    PeerLost(f"{self._name(peer.id)} is gone: its connection to {self.me} closed."), None
                )
            elif now >= peer.last_seen + self._settings.failure_timeout_s:
                self._fail(PeerLost(self._silence(peer)), None)
        for peer in self._peers.values():
            if peer.needed_until is not None and now >= peer.needed_until and not self.finishing:
                self._fail(
                    PeerShutDown(f"{self._name(peer.id)} has shut down, but {self.me} was not told to."), None
                )

    def _silence(self, peer: _Neighbour) -> str:
        seconds = f"{self._settings.failure_timeout_s:g} s (AFD_FAILURE_TIMEOUT)"
        if not peer.attached:
            return (
                f"{self._name(peer.id)} did not open its heartbeat connection to {self.me} within {seconds}."
            )
        return (
            f"{self._name(peer.id)} has been silent for {seconds}: "
            f"its process is stopped or overloaded, or the link to {self.me} is down."
        )

    def _drain_hub(self) -> None:
        hub = self._net.hub
        while hub is not None:
            try:
                frames = hub.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message = self._decoded(frames[-1].bytes) if len(frames) == 2 else None
            if message is None:
                continue
            peer = self._by_identity.get(frames[0].bytes)
            if peer is not None:
                self._handle(peer, message)
            elif isinstance(message, m.Attach):
                self._attach(message, frames[0].bytes, int(frames[1].get(zmq.SRCFD)))
            else:
                self._statistics.dropped["foreign"] += 1

    def _drain_uplink(self) -> None:
        uplink, parent = self._net.uplink, self._net.parent
        while uplink is not None and parent is not None:
            frame = _received(uplink.socket)
            if frame is None:
                return
            message = self._decoded(frame)
            if message is not None:
                self._handle(self._peers[parent], message)

    def _drain_events(self) -> None:
        if self._net.hub is not None:
            for event in self._net.hub.drain_events():
                if event.kind == DISCONNECTED:
                    for peer in self._peers.values():
                        if peer.descriptor == event.value:
                            self._closed(peer)
                self._statistics.strangers += event.kind == HANDSHAKE_FOREIGN
        if self._net.parent is not None:
            self._drain_parent_events(self._peers[self._net.parent])
        for channel in self._net.counted:
            self._statistics.strangers += sum(e.kind == HANDSHAKE_FOREIGN for e in channel.drain_events())

    def _drain_parent_events(self, parent: _Neighbour) -> None:
        for event in self._net.uplink.drain_events() if self._net.uplink else ():
            if event.kind == HANDSHAKE_DONE and not parent.attached:
                self._attach_due = True
            elif event.kind == DISCONNECTED and parent.attached:
                self._closed(parent)
        for event in self._net.watched.drain_events() if self._net.watched else ():
            if event.kind == DISCONNECTED:
                self._closed(parent)
        if self._attach_due:
            self._attach_due = not self._send(parent, m.Attach(self._epoch, self.me))

    def _closed(self, peer: _Neighbour) -> None:
        peer.confirmed = True
        peer.descriptor = -1
        if peer.lost_at is None:
            peer.lost_at = time.monotonic()

    def _decoded(self, frame: bytes) -> m.Message | None:
        try:
            message = m.decode(frame)
        except m.MalformedMessageError:
            self._statistics.dropped["malformed"] += 1
            return None
        if isinstance(
            message, m.Attach | m.Attached | m.Heartbeat | m.Abort | m.AbortSeen | m.Farewell | m.FarewellSeen
        ):
            if message.epoch == self._epoch:
                return message
            self._statistics.dropped["stale-epoch"] += 1
            return None
        self._statistics.dropped["unexpected"] += 1
        return None

    def _attach(self, message: m.Attach, identity: bytes, descriptor: int) -> None:
        peer = self._peers.get(message.member)
        if peer is None or peer.attached or message.member == self._net.parent:
            self._statistics.dropped["foreign"] += 1
            return
        # Descriptors are reused: what happened to an earlier connection must be accounted for first.
        self._drain_events()
        peer.identity, peer.descriptor = identity, descriptor
        self._by_identity[identity] = peer
        self._seen_attached(peer)
        self._send(peer, m.Attached(self._epoch))

    def _seen_attached(self, peer: _Neighbour) -> None:
        peer.attached = True
        peer.last_seen = time.monotonic()
        if all(p.attached for p in self._peers.values()):
            self._established.set()

    def _handle(self, peer: _Neighbour, message: m.Message) -> None:
        peer.last_seen = time.monotonic()
        if isinstance(message, m.Heartbeat):
            self._statistics.heartbeats_received += 1
        elif isinstance(message, m.Attached):
            self._seen_attached(peer)
        elif isinstance(message, m.Abort):
            self._send(peer, m.AbortSeen(self._epoch))
            self._fail(_failure_of(message, self._name(message.origin)), peer, message)
        elif isinstance(message, m.Farewell):
            self._on_farewell(peer)
        elif isinstance(message, m.AbortSeen | m.FarewellSeen):
            peer.confirmed = True
        else:
            self._statistics.dropped["unexpected"] += 1

    def _on_farewell(self, peer: _Neighbour) -> None:
        self._send(peer, m.FarewellSeen(self._epoch))
        peer.left = True
        self.left = self.left | {peer.id}
        if peer.id.role is Role.FFN and not self.finishing:
            if self.me.role is Role.ATTENTION:
                self._fail(
                    PeerShutDown(f"{self._name(peer.id)} has shut down while {self.me} still needs it."), peer
                )
            else:
                peer.needed_until = time.monotonic() + self._settings.drain_timeout_s
        self._wake()

    def _fail(self, error: AFDError, source: _Neighbour | None, relayed: m.Abort | None = None) -> None:
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

    def _send_abort(self, message: m.Abort, source: _Neighbour | None = None) -> None:
        self._quiet = True
        self._send_and_confirm(message, source)

    def _say_farewell(self) -> None:
        self._stopping = True
        self._send_and_confirm(m.Farewell(self._epoch), None)

    def _send_and_confirm(self, message: m.Abort | m.Farewell, source: _Neighbour | None) -> None:
        self._confirm_by = time.monotonic() + ACKNOWLEDGE_S
        for peer in self._peers.values():
            peer.confirmed = peer is source or not peer.attached or peer.left or peer.lost_at is not None
            if not peer.confirmed:
                self._send(peer, message)

    def _all_confirmed(self) -> bool:
        if self._confirm_by is None:
            return True
        done = all(p.confirmed for p in self._peers.values()) or time.monotonic() >= self._confirm_by
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
            except Exception:  # noqa: BLE001 - one callback must not keep the others from running
                logger.exception("A failure callback of %s failed", self.me)

    def _send(self, peer: _Neighbour, message: m.Message) -> bool:
        """Hand ``message`` to the socket; false, and counted, when the connection takes nothing now."""
        frame = m.encode(message)
        try:
            if peer.id == self._net.parent and self._net.uplink is not None:
                self._net.uplink.socket.send(frame, zmq.NOBLOCK)
            elif self._net.hub is not None:
                self._net.hub.socket.send_multipart([peer.identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            self._statistics.dropped["unsent"] += 1
            return False
        return True

    def _wake(self) -> None:
        with suppress(zmq.Again):  # it has not looked at an earlier call yet
            self._waker.send(b"", zmq.NOBLOCK)

    def _release(self) -> None:
        for channel in (self._net.hub, self._net.uplink):
            if channel is not None:
                channel.close(linger_ms=200)
        self._waker.close(0)
        self._bell.close(0)


def _failure_of(message: m.Abort, origin: str) -> AFDError:
    kind = by_name(message.error)
    if kind is PeerLost or kind is PeerShutDown or kind is RendezvousTimeout:
        return kind(message.reason)
    return PeerAborted(f"{origin} failed: {message.reason}", message.reason, message.traceback_tail)


def _received(socket: zmq.Socket[bytes]) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _pair(context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Two connected in-process sockets: one to poll, one to ring."""
    end, ringer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    end.bind(name)
    ringer.connect(name)
    return end, ringer
