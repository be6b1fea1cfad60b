# SPDX-License-Identifier: Apache-2.0
"""Sockets of the control plane: encrypted, bounded, and with their connection events.

The pre-shared token is the secret of the listening sockets: it is stretched into a CURVE key pair, and
whoever does not hold the token cannot finish a handshake, so none of a stranger's bytes reach a decoder or a
queue. The token itself never crosses the wire, and what does cross is encrypted.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from afd_plugin.control.address import Address
from afd_plugin.control.messages import MAX_FRAME_BYTES
from afd_plugin.errors import AddressRefused, PortInUse, UnsupportedFeature

QUEUE_MESSAGES = 256
"""Messages queued per connection and direction before TCP pushes back; bounds a connection to 16 MiB."""

HANDSHAKE_MS = 10_000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 1_000
_STRETCH_ROUNDS = 100_000
_STRETCH_SALT = b"afd_plugin control plane v1"

DISCONNECTED: int = zmq.EVENT_DISCONNECTED
CONNECTED: int = zmq.EVENT_CONNECTED
CLOSED: int = zmq.EVENT_CLOSED
HANDSHAKE_DONE: int = zmq.EVENT_HANDSHAKE_SUCCEEDED
HANDSHAKE_BROKEN: int = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
HANDSHAKE_FOREIGN: int = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = DISCONNECTED | CONNECTED | CLOSED | HANDSHAKE_DONE | HANDSHAKE_BROKEN | HANDSHAKE_FOREIGN


@dataclass(frozen=True)
class Keys:
    """The CURVE key pair that a token stands for, in Z85."""

    public: bytes
    secret: bytes

    @staticmethod
    @lru_cache(maxsize=4)
    def of(token: str) -> Keys:
        """Stretch ``token`` into a key pair (about 50 ms, once per process and token)."""
        if not zmq.has("curve"):
            raise UnsupportedFeature("This build of pyzmq has no CURVE security; install a pyzmq wheel.")
        secret = z85.encode(hashlib.pbkdf2_hmac("sha256", token.encode(), _STRETCH_SALT, _STRETCH_ROUNDS))
        return Keys(zmq.curve_public(secret), secret)


@dataclass(frozen=True)
class Event:
    """One change of a connection: what happened, and the file descriptor it had where there is one."""

    kind: int
    value: int


class Channel:
    """One socket and the stream of its connection events.

    The socket belongs to one thread at a time; ``events`` may be drained by the same or another thread.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        name = f"inproc://events-{id(self)}"
        socket.monitor(name, _EVENTS)
        self.events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        # Unbounded on purpose: at a bound libzmq would block its I/O thread, and with it every connection.
        self.events.rcvhwm = 0
        self.events.linger = 0
        self.events.connect(name)

    def drain_events(self) -> Iterator[Event]:
        """The events that have happened, oldest first, without waiting."""
        while True:
            try:
                message = recv_monitor_message(self.events, zmq.NOBLOCK)
            except zmq.Again:
                return
            yield Event(int(message["event"]), int(message["value"]))

    def close(self, linger_ms: int = 0) -> None:
        """Release both sockets; queued messages get up to ``linger_ms`` when the context ends."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.socket.close(linger_ms)
        self.events.close(0)


@dataclass(frozen=True)
class Listener:
    """A bound channel and the address it got."""

    channel: Channel
    bound: Address
    advertised: Address


def listen(
    context: zmq.Context[zmq.Socket[bytes]], address: Address, advertise: str, token: str, knob: str
) -> Listener:
    """Bind a ROUTER at ``address``.

    Args:
        context: Owner of the socket.
        address: Where to bind; port 0 lets the system choose.
        advertise: Host that peers dial; empty for the host of ``address``.
        token: The pre-shared token.
        knob: Where the address came from, for messages.

    Raises:
        AddressRefused: The address does not resolve, is not one of this machine, or is a wildcard and
            nothing says how to dial it.
        PortInUse: Another socket listens there.
    """
    if address.is_wildcard and not advertise:
        raise AddressRefused(
            f"{knob} is the wildcard {address}, which peers cannot dial; "
            "say under which host name or address they reach this machine (AFD_ADVERTISE)."
        )
    target = address.resolved(knob)
    keys = Keys.of(token)
    socket = _socket(context, zmq.ROUTER, target)
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public
    try:
        socket.bind(target.endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {address.port} of {address.host} is in use; stop what listens there, or choose "
                f"another address with {knob} (port 0 takes a free one)."
            ) from None
        raise AddressRefused(f"{knob} is {address}, which cannot be bound: {error.strerror}.") from None
    port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
    return Listener(Channel(socket), Address(target.host, port), Address(advertise or address.host, port))


def dial(context: zmq.Context[zmq.Socket[bytes]], address: Address, token: str) -> Channel:
    """A DEALER that connects to ``address`` and keeps trying; it queues nothing while it is not connected."""
    socket = _socket(context, zmq.DEALER, address)
    public, secret = zmq.curve_keypair()
    socket.curve_serverkey = Keys.of(token).public
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    socket.immediate = True
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = RECONNECT_MAX_MS
    channel = Channel(socket)
    try:
        socket.connect(address.endpoint)
    except zmq.ZMQError as error:
        channel.close()
        raise AddressRefused(f"The peer address {address} cannot be dialled: {error.strerror}.") from None
    return channel


def received(socket: zmq.Socket[bytes]) -> bytes | None:
    """The next message of one frame, or ``None`` when there is none now."""
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: Address) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.ipv6 = address.is_ipv6
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.sndhwm = QUEUE_MESSAGES
    socket.rcvhwm = QUEUE_MESSAGES
    socket.handshake_ivl = HANDSHAKE_MS
    socket.linger = 0
    return socket
