# SPDX-License-Identifier: Apache-2.0
"""One TCP connection between an FFN leader and a lane: authenticated, bounded, and interruptible from any thread.

The thread that exchanges is the thread that reads and writes: no other thread has to be woken on the way, which on a
busy host is most of what an exchange costs. Linux only (``SO_RCVTIMEO``, ``TCP_USER_TIMEOUT``).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct
import time

from afd_plugin.config import LinkSettings
from afd_plugin.errors import PeerLost, ProtocolError

HANDSHAKE_S = 2.0
"""How long a connection may take to say who it is, so that a silent stranger cannot hold up the lanes for long."""
_NONCE_BYTES = 32
_HELLO = struct.Struct("!4si32s")
_MAGIC = b"AFD1"
_CHUNK_BYTES = 1 << 16


def listening(settings: LinkSettings) -> tuple[socket.socket, str]:
    """A socket that listens beside the control plane's, and where peers find it, as ``"host port"``."""
    host = settings.listen_host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener, f"{settings.advertise or host} {listener.getsockname()[1]}"


class Stream:
    """A connected socket that carries messages whose sizes both ends know; everything that fails is ``PeerLost``.

    Args:
        connection: The socket, which the stream owns from now on.
        peer: How errors name the other end.
        timeout_s: Bound of one whole send or receive.
        backlog_bytes: What may arrive while a send waits for room, so that two ends that send at once go on.
        failure_timeout_s: How long sent bytes may stay without an acknowledgement of the other host.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        timeout_s: float,
        failure_timeout_s: float,
        backlog_bytes: int = 0,
    ) -> None:
        self._socket = connection
        self._peer = peer
        self._timeout_s = timeout_s
        self._backlog = bytearray()
        self._backlog_bytes = backlog_bytes
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * failure_timeout_s))
        self._bound_receives(timeout_s)

    def _bound_receives(self, seconds: float) -> None:
        self._limit_s = seconds
        whole, part = divmod(int(1_000_000 * seconds), 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", whole, part))

    def receive(self, into: memoryview) -> None:
        """Fill ``into``, which the peer sends as one message or several."""
        done = min(len(self._backlog), len(into))
        if done:
            into[:done] = self._backlog[:done]
            del self._backlog[:done]
        if done == len(into):
            return
        # The kernel counts the time limit over the whole of a MSG_WAITALL, not anew for each segment. A signal, or a
        # stop and its end, cuts that short with what has arrived by then; the rest is read as it comes.
        deadline, flags = time.monotonic() + self._limit_s, socket.MSG_WAITALL
        while True:
            try:
                arrived = self._socket.recv_into(into[done:], 0, flags)
            except BlockingIOError:
                raise self._lost(f"nothing arrived for {self._limit_s:g} s") from None
            except OSError as error:
                raise self._lost(str(error)) from error
            done += arrived
            if done == len(into):
                return
            if not arrived or not self._readable(deadline):
                raise self._lost(f"the connection ended or stalled {len(into) - done} bytes early")
            flags = socket.MSG_DONTWAIT

    def _readable(self, deadline: float) -> bool:
        """Whether anything, the end included, arrives before ``deadline``."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(1000 * max(0.0, deadline - time.monotonic())))

    def send(self, message: memoryview) -> None:
        """Send ``message`` whole. While the peer takes nothing, what it sends meanwhile is kept for ``receive``."""
        try:
            sent = self._send_now(message)
            if sent < len(message):
                self._send_slowly(message[sent:])
        except OSError as error:
            raise self._lost(str(error)) from error

    def _send_now(self, message: memoryview) -> int:
        try:
            return self._socket.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _send_slowly(self, message: memoryview) -> None:
        deadline = time.monotonic() + self._timeout_s
        ready = select.poll()
        while message:
            full = len(self._backlog) >= self._backlog_bytes
            ready.register(self._socket, select.POLLOUT if full else select.POLLOUT | select.POLLIN)
            events = ready.poll(1000 * max(0.0, deadline - time.monotonic()))
            if not events:
                raise self._lost(f"it took nothing for {self._timeout_s:g} s")
            if events[0][1] & select.POLLIN:
                self._keep(self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT))
            message = message[self._send_now(message) :]

    def _keep(self, arrived: bytes) -> None:
        if not arrived:
            raise self._lost("the connection ended")
        self._backlog += arrived

    def introduce(self, token: str, life: str, lane: int, patience_s: float) -> None:
        """Say that this end is ``lane`` of the service's ``life``, and demand proof that the other is its FFN.

        ``patience_s`` bounds the wait for an FFN that may have to hear other callers first.
        """
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._bound_receives(patience_s)
        self.send(memoryview(_HELLO.pack(_MAGIC, lane, nonce)))
        answer = self._bytes(2 * _NONCE_BYTES)
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(token, life, b"ffn", lane, nonce, theirs)):
            raise ProtocolError(f"what answers as {self._peer} does not hold this service's token.")
        self.send(memoryview(_proof(token, life, b"lane", lane, nonce, theirs)))
        self._bound_receives(self._timeout_s)

    def identify(self, token: str, life: str) -> int:
        """On the FFN: the lane that has called, once it has proven it. Raises ``PeerLost`` or ``ProtocolError``."""
        self._bound_receives(HANDSHAKE_S)
        magic, lane, nonce = _HELLO.unpack(self._bytes(_HELLO.size))
        if magic != _MAGIC:
            raise ProtocolError("a stranger called on the data plane.")
        own = secrets.token_bytes(_NONCE_BYTES)
        self.send(memoryview(own + _proof(token, life, b"ffn", lane, nonce, own)))
        if not hmac.compare_digest(self._bytes(_NONCE_BYTES), _proof(token, life, b"lane", lane, nonce, own)):
            raise ProtocolError("what called on the data plane does not hold this service's token.")
        self._bound_receives(self._timeout_s)
        self._peer = f"lane {lane} of this group"
        return int(lane)

    def _bytes(self, count: int) -> bytes:
        read = bytearray(count)
        self.receive(memoryview(read))
        return bytes(read)

    def _lost(self, reason: str) -> PeerLost:
        return PeerLost(f"cannot exchange with {self._peer}: {reason}")

    def abort(self) -> None:
        """End every wait on this stream, here and at the other end; callable from any thread, idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was faster, or close() was
            return

    def close(self) -> None:
        """Give the socket back; idempotent."""
        self._socket.close()


def _proof(token: str, life: str, side: bytes, lane: int, lane_nonce: bytes, ffn_nonce: bytes) -> bytes:
    """What only a holder of ``token`` can say, and only for this connection."""
    text = b"|".join((side, life.encode(), str(lane).encode(), lane_nonce, ffn_nonce))
    return hmac.new(token.encode(), text, hashlib.sha256).digest()
