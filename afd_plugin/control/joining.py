# SPDX-License-Identifier: Apache-2.0
"""The rendezvous as every member but its host sees it: knock, wait, be welcomed or refused."""

from __future__ import annotations

import logging
import threading
import time

import zmq

from afd_plugin.config import LinkSettings, Role
from afd_plugin.control import messages as m
from afd_plugin.control.address import Address
from afd_plugin.control.fingerprint import Fingerprint
from afd_plugin.control.membership import Membership
from afd_plugin.control.rendezvous import WORKER_HINT
from afd_plugin.control.sockets import (
    CONNECTED,
    DISCONNECTED,
    HANDSHAKE_BROKEN,
    HANDSHAKE_DONE,
    HANDSHAKE_FOREIGN,
    Channel,
)
from afd_plugin.errors import (
    AddressRefused,
    AFDError,
    DuplicateMember,
    FingerprintMismatch,
    ProtocolVersionMismatch,
    Refused,
    RendezvousTimeout,
    TokenRejected,
    UnknownMember,
    by_name,
)

logger = logging.getLogger(__name__)

TURNED_AWAY_S = 2.0
"""How long every handshake must break before a member concludes that its token is wrong."""

TURNED_AWAY_TIMES = 3
_TICK_S = 0.5


def error_of(message: m.Refuse) -> AFDError:
    """The error that a refusal stands for."""
    kind = by_name(message.error)
    if kind is FingerprintMismatch:
        return FingerprintMismatch(message.message, message.details)
    if kind in (DuplicateMember, UnknownMember, ProtocolVersionMismatch, RendezvousTimeout, AddressRefused):
        return kind(message.message)
    return Refused(message.message)


class Joining:
    """The rendezvous as every other member sees it; ``run`` it once."""

    def __init__(
        self,
        channel: Channel,
        peer: Address,
        me: m.Member,
        fingerprint: Fingerprint,
        settings: LinkSettings,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._channel = channel
        self._peer = peer
        self._me = me
        self._hello = m.encode(m.hello(m.Introduction(me, fingerprint)))
        self._settings = settings
        self._cancelled = cancelled or threading.Event()
        self._answered = False
        self._hello_due = False
        self._dropped_at: float | None = None
        self._progress: m.Progress | None = None
        self._connected_at = 0.0
        self._broken_since = 0.0
        self._broken = 0

    def run(self) -> Membership:
        """Knock until the host welcomes everybody.

        Raises:
            Refused: One of its kinds, as the host named it.
            TokenRejected: Every handshake with the host breaks.
            RendezvousTimeout: Nobody answered, or members were missing, for ``rendezvous_timeout_s``; or the wait
                was cancelled.
        """
        poller = zmq.Poller()
        poller.register(self._channel.socket, zmq.POLLIN)
        poller.register(self._channel.events, zmq.POLLIN)
        deadline = time.monotonic() + self._settings.rendezvous_timeout_s
        while (remaining := deadline - time.monotonic()) > 0:
            poller.poll(round(min(remaining, 0.01 if self._hello_due else _TICK_S) * 1000) + 1)
            self._drain_events(time.monotonic())
            if self._hello_due:
                self._knock()
            welcome = self._drain_messages()
            if welcome is not None:
                return Membership(self._me.id, welcome.epoch, welcome.members)
            if self._cancelled.is_set():
                raise RendezvousTimeout(f"{self._me.id} does not wait for {self._peer} any longer.")
        raise RendezvousTimeout(self._timeout_message())

    def _knock(self) -> None:
        try:
            self._channel.socket.send(self._hello, zmq.NOBLOCK)
        except zmq.Again:
            return
        self._hello_due = False

    def _drain_messages(self) -> m.Welcome | None:
        while True:
            try:
                frame = self._channel.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            message = m.decode(frame)
            if isinstance(message, m.Welcome):
                return message
            if isinstance(message, m.Refuse):
                raise error_of(message)
            if isinstance(message, m.Progress):
                self._progress = message
                logger.info(
                    "%s joined at %s; waiting for %s", self._me.id, self._peer, ", ".join(message.missing)
                )

    def _drain_events(self, now: float) -> None:
        for event in self._channel.drain_events():
            if event.kind == CONNECTED:
                self._connected_at = now
            elif event.kind == HANDSHAKE_DONE:
                self._answered = self._hello_due = True
                self._broken = 0
            elif event.kind == DISCONNECTED:
                self._progress = None
            elif event.kind == HANDSHAKE_FOREIGN:
                raise AddressRefused(
                    f"What listens at {self._peer} (AFD_PEER) is no AFD control plane of this version."
                )
            elif event.kind == HANDSHAKE_BROKEN and now - self._connected_at < 5:
                self._broken += 1
                if self._broken == 1:
                    self._broken_since = now
        if self._broken >= TURNED_AWAY_TIMES and now - self._broken_since >= TURNED_AWAY_S:
            raise TokenRejected(
                f"{self._peer} (AFD_PEER) turned {self._me.id} away {self._broken} times before any message: "
                "the token differs from that of the FFN service (AFD_TOKEN), or something else listens there."
            )

    def _timeout_message(self) -> str:
        bound = f"{self._settings.rendezvous_timeout_s:g} s (AFD_RENDEZVOUS_TIMEOUT)"
        if self._progress is not None:
            return (
                f"{self._me.id} joined the rendezvous at {self._peer}, which is incomplete after {bound}. "
                f"Joined: {', '.join(self._progress.joined)}. Missing: {', '.join(self._progress.missing)}. "
                f"{WORKER_HINT}"
            )
        if self._answered:
            return (
                f"{self._me.id} reached {self._peer} (AFD_PEER), but was not admitted within {bound}: "
                "the FFN service there is still busy with an earlier life, or has ended; see its log."
            )
        if self._connected_at:
            return (
                f"{self._peer} (AFD_PEER) accepts connections, but its handshake with {self._me.id} did not "
                f"finish within {bound}: what listens there is stopped, or is no AFD control plane."
            )
        return (
            f"Nobody answered {self._me.id} at {self._peer} (AFD_PEER) within {bound}. "
            f"Joined: {self._me.id}. Missing: {m.MemberId(Role.FFN, 0)}, which hosts the rendezvous; "
            "start it there (afd ffn), or correct the address."
        )
