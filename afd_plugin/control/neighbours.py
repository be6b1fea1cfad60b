# SPDX-License-Identifier: Apache-2.0
"""The connections of the monitor thread: who the neighbours are, what they send, what has closed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import zmq

from afd_plugin.control import messages as m
from afd_plugin.control.sockets import DISCONNECTED, HANDSHAKE_DONE, HANDSHAKE_FOREIGN, Channel, received
from afd_plugin.control.statistics import Statistics

_UNDERSTOOD = (m.Attach, m.Attached, m.Heartbeat, m.Abort, m.AbortSeen, m.Farewell, m.FarewellSeen)


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
class Neighbour:
    """What is known about one neighbour; times by ``time.monotonic()``.

    Attributes:
        id: Which member it is.
        last_seen: When it was last heard.
        identity: Its connection at the hub; empty for the parent.
        descriptor: File descriptor of that connection, -1 when there is none.
        attached: Whether its heartbeat connection is up and introduced.
        left: Whether it has said farewell.
        lost_at: When a connection of it closed.
        needed_until: How long it may be gone before this member must have been told to end as well.
        confirmed: Whether it has confirmed the last abort or farewell, or cannot.
    """

    id: m.MemberId
    last_seen: float
    identity: bytes = b""
    descriptor: int = -1
    attached: bool = False
    left: bool = False
    lost_at: float | None = None
    needed_until: float | None = None
    confirmed: bool = False


class Neighbourhood:
    """The neighbours and their sockets; everything here belongs to the monitor thread."""

    def __init__(self, me: m.MemberId, epoch: int, statistics: Statistics, declared: Neighbours) -> None:
        now = time.monotonic()
        ids = [*declared.children, *([declared.parent] if declared.parent else [])]
        self.peers = {id_: Neighbour(id_, now) for id_ in ids}
        self.attach_due = False
        """Whether the uplink is up and the parent has not been introduced to this member yet."""
        self._me = me
        self._epoch = epoch
        self._statistics = statistics
        self._net = declared
        self._by_identity: dict[bytes, Neighbour] = {}

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Everything to poll."""
        channels = [channel for channel in (self._net.hub, self._net.uplink) if channel is not None]
        found = [socket for channel in channels for socket in (channel.socket, channel.events)]
        found += [channel.events for channel in self._net.counted]
        return found if self._net.watched is None else [*found, self._net.watched.events]

    def name(self, id_: m.MemberId) -> str:
        """How ``id_`` is called in messages."""
        return self._net.names.get(id_, str(id_))

    def all_attached(self) -> bool:
        """Whether every neighbour's heartbeat connection is up."""
        return all(peer.attached for peer in self.peers.values())

    def receive(self) -> Iterator[tuple[Neighbour, m.Message]]:
        """What the neighbours have sent, without waiting; connections that attach are admitted."""
        yield from self._receive_from_children()
        yield from self._receive_from_parent()

    def send(self, peer: Neighbour, message: m.Message) -> bool:
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

    def drain_events(self) -> None:
        """Note which connections have closed or come up."""
        for event in self._net.hub.drain_events() if self._net.hub else ():
            self._statistics.strangers += event.kind == HANDSHAKE_FOREIGN
            if event.kind == DISCONNECTED:
                for peer in self.peers.values():
                    if peer.descriptor == event.value:
                        _close(peer)
        for channel in self._net.counted:
            self._statistics.strangers += sum(e.kind == HANDSHAKE_FOREIGN for e in channel.drain_events())
        if self._net.parent is not None:
            self._drain_parent_events(self.peers[self._net.parent])

    def release(self) -> None:
        """Close the hub and the uplink."""
        for channel in (self._net.hub, self._net.uplink):
            if channel is not None:
                channel.close(linger_ms=200)

    def _drain_parent_events(self, parent: Neighbour) -> None:
        for event in self._net.uplink.drain_events() if self._net.uplink else ():
            if event.kind == HANDSHAKE_DONE and not parent.attached:
                self.attach_due = True
            elif event.kind == DISCONNECTED and parent.attached:
                _close(parent)
        for event in self._net.watched.drain_events() if self._net.watched else ():
            if event.kind == DISCONNECTED:
                _close(parent)
        if self.attach_due:
            self.attach_due = not self.send(parent, m.Attach(self._epoch, self._me))

    def _receive_from_children(self) -> Iterator[tuple[Neighbour, m.Message]]:
        hub = self._net.hub
        while hub is not None:
            try:
                frames = hub.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) != 2:
                self._statistics.dropped["malformed"] += 1
                continue
            message = self._decoded(frames[1].bytes)
            peer = self._by_identity.get(frames[0].bytes)
            if message is None:
                continue
            if peer is not None:
                peer.last_seen = time.monotonic()
                yield peer, message
            elif isinstance(message, m.Attach):
                self._admit(message, frames[0].bytes, int(frames[1].get(zmq.SRCFD)))
            else:
                self._statistics.dropped["foreign"] += 1

    def _receive_from_parent(self) -> Iterator[tuple[Neighbour, m.Message]]:
        uplink, parent = self._net.uplink, self._net.parent
        while uplink is not None and parent is not None:
            frame = received(uplink.socket)
            if frame is None:
                return
            message = self._decoded(frame)
            if message is None:
                continue
            peer = self.peers[parent]
            peer.last_seen = time.monotonic()
            if isinstance(message, m.Attached):
                peer.attached = True
            else:
                yield peer, message

    def _admit(self, message: m.Attach, identity: bytes, descriptor: int) -> None:
        peer = self.peers.get(message.member)
        if peer is None or peer.attached or message.member == self._net.parent:
            self._statistics.dropped["foreign"] += 1
            return
        # Descriptors are reused: what happened to an earlier connection must be accounted for first.
        self.drain_events()
        peer.identity, peer.descriptor = identity, descriptor
        peer.attached, peer.last_seen = True, time.monotonic()
        self._by_identity[identity] = peer
        self.send(peer, m.Attached(self._epoch))

    def _decoded(self, frame: bytes) -> m.Message | None:
        try:
            message = m.decode(frame)
        except m.MalformedMessageError:
            self._statistics.dropped["malformed"] += 1
            return None
        if not isinstance(message, _UNDERSTOOD):
            self._statistics.dropped["unexpected"] += 1
            return None
        if message.epoch != self._epoch:
            self._statistics.dropped["stale-epoch"] += 1
            return None
        return message


def _close(peer: Neighbour) -> None:
    peer.confirmed = True
    peer.descriptor = -1
    if peer.lost_at is None:
        peer.lost_at = time.monotonic()
