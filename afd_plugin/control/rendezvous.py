# SPDX-License-Identifier: Apache-2.0
"""The rendezvous: everybody knocks at FFN group 0, is compared with it, and learns where the others are.

It happens after a member has built its model and before it loads weights, so that two roles started with
different models, versions or placements are refused in seconds. :class:`Host` is the side of FFN group 0's
leader, :mod:`~afd_plugin.control.joining` that of every other member; ``rendezvous_timeout_s`` bounds both.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass

import zmq

from afd_plugin.config import LinkSettings, Role
from afd_plugin.control import messages as m
from afd_plugin.control.fingerprint import Fingerprint, diff
from afd_plugin.control.membership import Membership, expected_members
from afd_plugin.control.sockets import (
    DISCONNECTED,
    HANDSHAKE_FOREIGN,
    Listener,
)
from afd_plugin.control.statistics import Statistics
from afd_plugin.errors import (
    AFDError,
    DuplicateMember,
    FingerprintMismatch,
    ProtocolVersionMismatch,
    Refused,
    RendezvousTimeout,
    UnknownMember,
)
from afd_plugin.topology import Topology

logger = logging.getLogger(__name__)

REFUSE_GRACE_S = 1.0
"""How long a host that refuses everybody stays to tell members that have not knocked yet."""

_TICK_S = 0.5

WORKER_HINT = (
    "An attention engine that is running but missing here was perhaps started without --worker-cls "
    "afd_plugin.v1.worker.attention_worker.AFDAttentionWorker "
    "(on CPU afd_plugin.v1.worker.cpu_attention_worker.CPUAFDAttentionWorker)."
)


@dataclass
class _Seat:
    member: m.Member
    identity: bytes
    descriptor: int


class Host:
    """The rendezvous as FFN group 0's leader runs it."""

    def __init__(
        self,
        listener: Listener,
        me: m.Member,
        topology: Topology,
        fingerprint: Fingerprint,
        settings: LinkSettings,
        statistics: Statistics,
    ) -> None:
        self._listener = listener
        self._socket = listener.channel.socket
        self._me = me
        self._fingerprint = fingerprint
        self._settings = settings
        self._statistics = statistics
        self._expected = expected_members(topology)
        self._seats: dict[m.MemberId, _Seat] = {}
        self._left: set[m.MemberId] = set()
        self._verdict: Refused | None = None
        self._told: set[bytes] = set()
        self._leaving: set[int] = set()

    @property
    def identities(self) -> dict[bytes, m.MemberId]:
        """The connection of each admitted member."""
        return {seat.identity: id_ for id_, seat in self._seats.items()}

    def gather(self) -> Membership:
        """Admit every expected member and send each the directory.

        Raises:
            FingerprintMismatch: A member was started with something else; all members are told.
            RendezvousTimeout: Members are missing after ``rendezvous_timeout_s``; those present are told.
        """
        started = time.monotonic()
        while missing := self._missing():
            elapsed = time.monotonic() - started
            if elapsed >= self._settings.rendezvous_timeout_s:
                timeout = RendezvousTimeout(self._timeout_message(missing))
                self._refuse_seated(timeout)
                self._stay(everybody=False)
                raise timeout
            self._turn(min(_TICK_S, self._settings.rendezvous_timeout_s - elapsed))
            if self._verdict is not None:
                self._stay(everybody=True)
                raise self._verdict
        return self._welcome()

    def _missing(self) -> list[m.MemberId]:
        return [id_ for id_ in self._expected if id_ != self._me.id and id_ not in self._seats]

    def _welcome(self) -> Membership:
        everybody = {id_: seat.member for id_, seat in self._seats.items()} | {self._me.id: self._me}
        membership = Membership(
            self._me.id, secrets.randbits(63), tuple(everybody[id_] for id_ in self._expected)
        )
        for seat in self._seats.values():
            self._send(seat.identity, m.Welcome(membership.epoch, membership.members))
        return membership

    def _turn(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._listener.channel.events, zmq.POLLIN)
        poller.poll(round(timeout_s * 1000) + 1)
        self._drain_events()
        for _ in range(2 * len(self._expected) + 16):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) != 2:
                self._statistics.dropped["malformed"] += 1
                continue
            # Descriptors are reused: what happened to an earlier connection must be accounted for first.
            self._drain_events()
            self._handle(frames[0].bytes, int(frames[1].get(zmq.SRCFD)), frames[1].bytes)

    def _drain_events(self) -> None:
        for event in self._listener.channel.drain_events():
            if event.kind == HANDSHAKE_FOREIGN:
                self._statistics.strangers += 1
            elif event.kind == DISCONNECTED:
                self._leaving.discard(event.value)
                for id_ in [id_ for id_, seat in self._seats.items() if seat.descriptor == event.value]:
                    logger.warning("%s left the rendezvous again", id_)
                    del self._seats[id_]
                    self._left.add(id_)

    def _handle(self, identity: bytes, descriptor: int, frame: bytes) -> None:
        try:
            message = m.decode(frame)
        except m.MalformedMessageError:
            self._statistics.dropped["malformed"] += 1
            return
        if not isinstance(message, m.Hello):
            self._statistics.dropped["foreign"] += 1
            return
        try:
            introduction = opened(message)
        except m.MalformedMessageError:
            self._statistics.dropped["malformed"] += 1
        except ProtocolVersionMismatch as error:
            self._refuse(identity, descriptor, error)
        else:
            self._admit(identity, descriptor, introduction)

    def _admit(self, identity: bytes, descriptor: int, introduction: m.Introduction) -> None:
        member = introduction.member
        seat = self._seats.get(member.id)
        if seat is not None and seat.identity == identity:
            return
        holder = self._me if member.id == self._me.id else seat.member if seat is not None else None
        error = self._verdict or judge(introduction, self._fingerprint, self._me, self._expected, holder)
        if error is None:
            self._seats[member.id] = _Seat(member, identity, descriptor)
            logger.info("%s (%s) joined the rendezvous", member.id, member.process)
            self._report_progress()
            return
        self._refuse(identity, descriptor, error)
        if isinstance(error, FingerprintMismatch) and holder is None and self._verdict is None:
            self._verdict = error
            self._refuse_seated(error)

    def _report_progress(self) -> None:
        missing = tuple(map(str, self._missing()))
        joined = tuple(map(str, [self._me.id, *self._seats]))
        for seat in self._seats.values():
            self._send(seat.identity, m.Progress(joined, missing))

    def _stay(self, everybody: bool) -> None:
        """Stay until the refused have read it and left, or until everybody has come to be refused.

        A dealer loses what it has not read yet when its peer closes the connection.
        """
        until = time.monotonic() + REFUSE_GRACE_S
        while (remaining := until - time.monotonic()) > 0:
            if not self._leaving and (not everybody or len(self._told) >= len(self._expected) - 1):
                return
            self._turn(remaining)

    def _refuse_seated(self, error: AFDError) -> None:
        for seat in self._seats.values():
            self._refuse(seat.identity, seat.descriptor, error)

    def _refuse(self, identity: bytes, descriptor: int, error: AFDError) -> None:
        self._statistics.refused[error.name] += 1
        logger.error("Refused a member: %s", error.line())
        self._told.add(identity)
        self._leaving.add(descriptor)
        self._send(identity, refusal(error))

    def _send(self, identity: bytes, message: m.Message) -> None:
        try:
            self._socket.send_multipart([identity, m.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            self._statistics.dropped["unsent"] += 1

    def _timeout_message(self, missing: list[m.MemberId]) -> str:
        joined = ", ".join(map(str, [self._me.id, *sorted(self._seats)]))
        text = (
            f"The rendezvous at {self._listener.advertised} is incomplete after "
            f"{self._settings.rendezvous_timeout_s:g} s (AFD_RENDEZVOUS_TIMEOUT). "
            f"Joined: {joined}. Missing: {', '.join(map(str, missing))}."
        )
        came_and_went = [str(id_) for id_ in missing if id_ in self._left]
        if came_and_went:
            text += f" {', '.join(came_and_went)} had joined and left again: see its own log."
        if any(id_.role is Role.ATTENTION for id_ in missing):
            text += f" {WORKER_HINT}"
        if self._statistics.strangers:
            text += (
                f" {self._statistics.strangers} connection attempts were turned away because they do not "
                "hold this token (AFD_TOKEN)."
            )
        return text


def opened(message: m.Hello) -> m.Introduction:
    """The body of a Hello.

    Raises:
        ProtocolVersionMismatch: It speaks another version.
        MalformedMessageError: It does not decode.
    """
    if message.version != m.PROTOCOL_VERSION:
        raise ProtocolVersionMismatch(
            f"The member speaks version {message.version} of the control protocol, this service version "
            f"{m.PROTOCOL_VERSION}; install the same afd-plugin on both sides."
        )
    return m.introduction(message)


def judge(
    introduction: m.Introduction,
    fingerprint: Fingerprint,
    me: m.Member,
    expected: tuple[m.MemberId, ...],
    holder: m.Member | None,
) -> Refused | None:
    """Why a member cannot be admitted, or ``None``. ``holder`` is who has its seat already."""
    member = introduction.member
    lines = diff(fingerprint, introduction.fingerprint, str(me.id), str(member.id))
    if lines:
        text = f"{member.id} ({member.process}) was started with something else than {me.id} ({me.process}):"
        return FingerprintMismatch("\n  ".join([text, *lines]), lines)
    if holder is not None:
        return DuplicateMember(
            f"{member.id} is already {holder.process}; {member.process} claims to be it as well. "
            "Stop one of them, or give it another index."
        )
    if member.id not in expected:
        return UnknownMember(
            f"{member.process} claims to be {member.id}, which the topology does not have; "
            f"it has {', '.join(map(str, expected))}."
        )
    return None


def refusal(error: AFDError) -> m.Refuse:
    """The message that tells a member of ``error``."""
    details = error.differences if isinstance(error, FingerprintMismatch) else ()
    return m.Refuse(
        error.name, m.clip_text(str(error)), tuple(m.clip_text(line, 500) for line in details[:40])
    )
