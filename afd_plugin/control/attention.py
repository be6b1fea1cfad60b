# SPDX-License-Identifier: Apache-2.0
"""The attention end of the control plane: one lane's leader. The contract is in :mod:`afd_plugin.control`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import zmq

from afd_plugin.config import LinkSettings, Role
from afd_plugin.control import messages as m
from afd_plugin.control.address import Address
from afd_plugin.control.fingerprint import Fingerprint
from afd_plugin.control.joining import Joining
from afd_plugin.control.link import Control, process_name
from afd_plugin.control.membership import Membership
from afd_plugin.control.neighbours import Neighbours
from afd_plugin.control.sockets import Channel, dial
from afd_plugin.errors import (
    AFDError,
    PeerLost,
)
from afd_plugin.plan import StepPlan
from afd_plugin.topology import Topology

logger = logging.getLogger(__name__)


class AttentionControl(Control):
    """The end of one attention lane's leader."""

    def __init__(self) -> None:
        super().__init__()
        self._host: Channel | None = None
        self._step: zmq.Socket[bytes] | None = None
        self._shards: tuple[zmq.Socket[bytes], ...] = ()
        """Step connections to further FFN shards, which hear what the first one hears."""
        self._epoch = 0
        self._shut_down = False

    def connect(
        self,
        settings: LinkSettings,
        topology: Topology,
        lane: int,
        fingerprint: Fingerprint,
        data: Mapping[str, str] | None = None,
        cancelled: threading.Event | None = None,
    ) -> Membership:
        """Meet all members at ``settings.peer``; once, after the model is built and before weights load.

        ``data`` is handed to every member. Setting ``cancelled`` from another thread ends the wait within a second.

        Raises:
            Refused: One of its kinds: an address, the token, the fingerprint or the lane is wrong.
            RendezvousTimeout: Nobody answered, or members were missing, or the wait was cancelled.
        """
        context = self._open(settings)
        me = m.Member(m.MemberId(Role.ATTENTION, lane), process_name(), data=dict(data or {}))
        try:
            return self._connect(context, topology, me, fingerprint, cancelled)
        except BaseException:
            self.close()
            raise

    def _connect(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        topology: Topology,
        member: m.Member,
        fingerprint: Fingerprint,
        cancelled: threading.Event | None,
    ) -> Membership:
        me = member.id
        peer = self._peer()
        self._host = step = self._dial(peer)
        self._membership = Joining(self._host, peer, member, fingerprint, self._settings, cancelled).run()
        self._epoch = self._membership.epoch
        group = self._membership.group(topology.group_of(me.index))
        heartbeat = Address.parse(group.heartbeat_address, f"the heartbeat address of {group.id}")
        if group.id.index:
            step = self._step_connection(me, group)
        self._step = step.socket
        further = range(1, topology.ffn_shards)
        self._shards = tuple(
            self._step_connection(me, self._membership.group(shard)).socket for shard in further
        )
        self._poller.register(self._host.socket, zmq.POLLIN)
        uplink = dial(context, heartbeat, self._settings.token)
        monitor = self._start_monitor(
            me,
            Neighbours(
                uplink=uplink, parent=group.id, watched=step, names=self._names(self._membership.members)
            ),
        )
        monitor.wait_established(self._settings.failure_timeout_s + 1)
        return self._membership

    def _step_connection(self, me: m.MemberId, group: m.Member) -> Channel:
        """A connection for steps to a group that does not host the rendezvous."""
        address = Address.parse(group.address, f"the address of {group.id}")
        channel = self._dial(address)
        self._attach(channel, me, group, address)
        return channel

    def _attach(self, channel: Channel, me: m.MemberId, group: m.Member, address: Address) -> None:
        """Introduce this lane on a step connection of its own, made after the rendezvous."""
        frame = m.encode(m.Attach(self._epoch, me))
        deadline = time.monotonic() + self._settings.failure_timeout_s
        sent = False
        while (remaining := deadline - time.monotonic()) > 0:
            if not sent and channel.socket.poll(round(remaining * 1000), zmq.POLLOUT):
                channel.socket.send(frame, zmq.NOBLOCK)
                sent = True
            elif sent and channel.socket.poll(round(remaining * 1000)):
                answer = m.decode(channel.socket.recv(zmq.NOBLOCK))
                if isinstance(answer, m.Attached) and answer.epoch == self._epoch:
                    return
        raise PeerLost(
            f"{me} cannot reach {group.id} ({group.process}) at {address} within "
            f"{self._settings.failure_timeout_s:g} s (AFD_FAILURE_TIMEOUT); the address that this group gave "
            "must be reachable from here (AFD_LISTEN and AFD_ADVERTISE of that process)."
        )

    def ready(self, data: Mapping[str, str] | None = None) -> None:
        """Say that this lane has its weights and its data plane; returns at once."""
        self._live()
        assert self._host is not None  # noqa: S101 - _live() has checked
        self._send(self._host.socket, m.Ready(self._epoch, dict(data or {})))

    def wait_ready(self, timeout_s: float | None = None) -> Membership:
        """Wait until every member is ready; the membership then has the groups' last ``data``.

        ``timeout_s`` defaults to ``ready_timeout_s``, which may be long: a peer that dies or falls silent
        meanwhile ends the wait within ``failure_timeout_s``.

        Raises:
            PeerFailure: A peer died, was silent, aborted or shut down.
            RendezvousTimeout: A member was not ready in time.
        """
        self._live()
        assert self._host is not None  # noqa: S101 - _live() has checked
        return self._wait_go(self._host, timeout_s)

    def announce(self, plan: StepPlan) -> None:
        """Announce the forward pass that is about to run; returns once it is queued.

        Raises:
            PeerFailure: A peer has failed; the pass must not run.
        """
        self._in_band(m.Step.of(self._epoch, plan))
        self.statistics.steps_sent += 1

    def profile(self, start: bool, prefix: str = "") -> None:
        """Start or stop the FFN's profiler, after the steps announced so far."""
        self._in_band(m.Profile(start, prefix, self._epoch))

    def drain(self) -> None:
        """Say that no new requests will come; running ones may still announce steps."""
        self._in_band(m.Drain(self._epoch))

    def shutdown(self) -> None:
        """Say that this lane announces nothing any more; idempotent. The FFN ends when all its lanes have."""
        if self._shut_down or self._monitor is None or self._closed:
            return
        self._shut_down = True
        self._monitor.finishing = True
        if self._monitor.failure is None:
            self._in_band(m.Shutdown(self._epoch))

    def close(self) -> None:
        """As :meth:`Control.close`; says :meth:`shutdown` first if that has not happened."""
        try:
            self.shutdown()
        except AFDError as error:
            logger.warning("The FFN could not be told of the end: %s", error.line())
        finally:
            super().close()

    def _in_band(self, message: m.InBand) -> None:
        self._live()
        assert self._step is not None  # noqa: S101 - _live() has checked
        for connection in (self._step, *self._shards):
            self._send(connection, message)

    def _send(self, socket: zmq.Socket[bytes], message: m.Message) -> None:
        frame = m.encode(message)
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._send_late(socket, frame)

    def _send_late(self, socket: zmq.Socket[bytes], frame: bytes) -> None:
        """The queue is full, or the connection has just closed and the monitor is about to say so."""
        deadline = time.monotonic() + self._settings.failure_timeout_s
        while time.monotonic() < deadline:
            if socket.poll(50, zmq.POLLOUT):
                self._live()
                socket.send(frame, zmq.NOBLOCK)
                return
            self._live()
        raise PeerLost(
            f"The connection of {self.membership.me} to its FFN group took no message for "
            f"{self._settings.failure_timeout_s:g} s (AFD_FAILURE_TIMEOUT)."
        )
