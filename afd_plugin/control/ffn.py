# SPDX-License-Identifier: Apache-2.0
"""The FFN end of the control plane: one group's leader. The contract is in :mod:`afd_plugin.control`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import zmq

from afd_plugin.config import LinkSettings, Role
from afd_plugin.control import messages as m
from afd_plugin.control.address import Address
from afd_plugin.control.fingerprint import Fingerprint
from afd_plugin.control.independent import IndependentMerger
from afd_plugin.control.joining import Joining
from afd_plugin.control.link import Control, process_name
from afd_plugin.control.membership import Membership
from afd_plugin.control.merge import Event, Merger
from afd_plugin.control.monitor import Monitor
from afd_plugin.control.neighbours import Neighbours
from afd_plugin.control.rendezvous import Host, judge, opened, refusal
from afd_plugin.control.sockets import Channel, Listener, dial, listen
from afd_plugin.errors import (
    PeerLost,
    PeerShutDown,
    ProtocolVersionMismatch,
    Refused,
    RendezvousTimeout,
)
from afd_plugin.topology import Topology

logger = logging.getLogger(__name__)

LATE_SHUTDOWN_S = 1.0
"""How long the in-band Shutdown of a lane may trail behind its farewell."""

_BATCH = 256
_LONG_S = 3600.0


class FFNControl(Control):
    """The end of one FFN group's leader; that of group 0 hosts the rendezvous."""

    def __init__(self) -> None:
        super().__init__()
        self._router: zmq.Socket[bytes] | None = None
        self._host: Channel | None = None
        self._me: m.Member | None = None
        self._lanes: tuple[int, ...] = ()
        self._identities: dict[bytes, m.MemberId] = {}
        self._ready_members: dict[m.MemberId, dict[str, str]] = {}
        self._merger: Merger | None = None
        self._fingerprint: Fingerprint | None = None
        self._left_at: dict[int, float] = {}
        self._first_end: float | None = None

    def listen(
        self,
        settings: LinkSettings,
        topology: Topology,
        group: int,
        fingerprint: Fingerprint,
        data: Mapping[str, str] | None = None,
        on_bound: Callable[[str], None] | None = None,
    ) -> Membership:
        """Bind ``settings.listen`` and meet all members; once, between building the model and its weights.

        Group 0 hosts the rendezvous, the others join it at ``settings.peer``. ``data`` is handed to every
        member. ``on_bound`` is called with the address that peers dial: news when ``listen`` has port 0.

        Raises:
            Refused: One of its kinds: an address, a port, the token or a member does not fit.
            RendezvousTimeout: Members were missing.
        """
        context = self._open(settings)
        try:
            return self._listen(context, topology, group, fingerprint, dict(data or {}), on_bound)
        except BaseException:
            self.close()
            raise

    def _listen(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        topology: Topology,
        group: int,
        fingerprint: Fingerprint,
        data: dict[str, str],
        on_bound: Callable[[str], None] | None,
    ) -> Membership:
        settings = self._settings
        address = Address.parse(settings.listen, "AFD_LISTEN")
        self._require_token(address, "AFD_LISTEN")
        main = listen(context, address, settings.advertise, settings.token, "AFD_LISTEN")
        self._channels.append(main.channel)
        beats = listen(context, Address(address.host, 0), settings.advertise, settings.token, "AFD_LISTEN")
        self._channels.append(beats.channel)
        self._router = main.channel.socket
        self._lanes = topology.lanes_of(group)
        self._fingerprint = fingerprint
        me = m.Member(
            m.MemberId(Role.FFN, group), process_name(), str(main.advertised), str(beats.advertised), data
        )
        self._me = me
        if on_bound is not None:
            on_bound(me.address)
        children = tuple(
            m.MemberId(Role.ATTENTION, lane) for lane in self._lanes if topology.group_of(lane) == group
        )
        if group == 0:
            children += tuple(m.MemberId(Role.FFN, other) for other in range(1, topology.ffn_members))
            host = Host(main, me, topology, fingerprint, settings, self.statistics)
            self._membership = host.gather()
            self._identities = host.identities
            neighbours = Neighbours(beats.channel, children, counted=(main.channel,))
        else:
            neighbours = self._join(context, main, beats, children, fingerprint)
        kind = IndependentMerger if topology.independent_lanes else Merger
        self._merger = kind(
            self.membership.epoch, self._lanes, topology.attention_dp, fingerprint.max_tokens, self.statistics
        )
        neighbours = replace(neighbours, names=self._names(self.membership.members))
        self._poller.register(self._router, zmq.POLLIN)
        monitor = self._start_monitor(me.id, neighbours)
        self._await_lanes()
        monitor.wait_established(settings.failure_timeout_s + 1)
        return self.membership

    def _join(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        main: Listener,
        beats: Listener,
        children: tuple[m.MemberId, ...],
        fingerprint: Fingerprint,
    ) -> Neighbours:
        assert self._me is not None  # noqa: S101 - _listen has run
        peer = self._peer()
        self._host = self._dial(peer)
        self._membership = Joining(self._host, peer, self._me, fingerprint, self._settings).run()
        self._poller.register(self._host.socket, zmq.POLLIN)
        host = self._membership.group(0)
        uplink = dial(
            context,
            Address.parse(host.heartbeat_address, f"the heartbeat address of {host.id}"),
            self._settings.token,
        )
        return Neighbours(beats.channel, children, uplink, host.id, self._host, (main.channel,))

    def _await_lanes(self) -> None:
        """Wait for the lanes' step connections: group 0 has them from the rendezvous, others get them now."""
        deadline = time.monotonic() + self._settings.failure_timeout_s
        while len([id_ for id_ in self._identities.values() if id_.role is Role.ATTENTION]) < len(
            self._lanes
        ):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                attached = {id_.index for id_ in self._identities.values()}
                missing = ", ".join(str(lane) for lane in self._lanes if lane not in attached)
                raise PeerLost(
                    f"Attention lane {missing} did not connect to {self.membership.me} within "
                    f"{self._settings.failure_timeout_s:g} s (AFD_FAILURE_TIMEOUT); the address that this "
                    "process gave must be reachable from the attention side (AFD_LISTEN, AFD_ADVERTISE)."
                )
            self._wait(remaining)
            self._receive()

    def ready(self, data: Mapping[str, str] | None = None) -> None:
        """Say that this group has its weights and its data plane; returns at once.

        ``data`` adds to what :meth:`listen` was given; members see it after their :meth:`wait_ready`.
        """
        self._live()
        message = m.Ready(self.membership.epoch, dict(data or {}))
        if self._host is None:
            self._ready_members[self.membership.me] = message.data
        else:
            self._host.socket.send(m.encode(message), zmq.NOBLOCK)

    def wait_ready(self, timeout_s: float | None = None) -> Membership:
        """Wait until every member is ready; as :meth:`AttentionControl.wait_ready`."""
        if self._host is not None:
            return self._wait_go(self._host, timeout_s)
        bound = self._settings.ready_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + bound
        while True:
            monitor = self._live()
            self._receive()
            waiting = [
                member.id for member in self.membership.members if member.id not in self._ready_members
            ]
            if not waiting:
                return self._go()
            gone = [id_ for id_ in waiting if id_ in monitor.left]
            if gone:
                raise PeerShutDown(f"{gone[0]} has shut down before it was ready; see its own log.")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                error = RendezvousTimeout(
                    f"Not ready after {bound:g} s (AFD_READY_TIMEOUT): {', '.join(map(str, waiting))}. "
                    "They are alive and still load; raise the bound if the model is large."
                )
                self.abort(error)
                raise error
            self._wait(remaining)

    def _go(self) -> Membership:
        data = [
            {**group.data, **self._ready_members[group.id]}
            for group in self.membership.members
            if group.id.role is Role.FFN
        ]
        self._tell_all(m.Go(self.membership.epoch, tuple(data)))
        self._membership = self.membership.with_data(data)
        return self._membership

    def _tell_all(self, message: m.Message) -> None:
        assert self._router is not None  # noqa: S101 - listen() has run
        frame = m.encode(message)
        for identity in self._identities:
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """The next step, or other event, that all lanes of this group agree on; sleeps until there is one.

        Returns ``None`` when ``timeout_s`` passes first; without it, the peers' liveness bounds the wait.

        Raises:
            PeerFailure: A peer died, was silent, aborted, or shut down while another still announces steps.
            ProtocolError: The lanes contradict each other or themselves; :meth:`abort` with it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            monitor = self._live()
            assert self._merger is not None  # noqa: S101 - _live() has checked
            self._receive()
            event = self._merger.next()
            if event is not None:
                monitor.finishing = monitor.finishing or isinstance(event, m.Shutdown)
                return event
            now = time.monotonic()
            wait = self._closing_bound(monitor, self._merger, now)
            if deadline is not None:
                if now >= deadline:
                    return None
                wait = min(wait, deadline - now)
            self._wait(wait)

    def _closing_bound(self, monitor: Monitor, merger: Merger, now: float) -> float:
        """Seconds until something must happen because some lanes have left or shut down."""
        for lane in merger.running:
            if m.MemberId(Role.ATTENTION, lane) not in monitor.left:
                continue
            if now - self._left_at.setdefault(lane, now) >= LATE_SHUTDOWN_S:
                merger.end(lane)
                return 0.0
        if not merger.ended or isinstance(merger, IndependentMerger):
            return LATE_SHUTDOWN_S if self._left_at else _LONG_S
        self._first_end = self._first_end or now
        remaining = self._first_end + self._settings.drain_timeout_s - now
        if remaining <= 0:
            raise PeerShutDown(
                f"Attention lanes {list(merger.ended)} have shut down, but lanes {list(merger.running)} "
                f"had not {self._settings.drain_timeout_s:g} s later (AFD_DRAIN_TIMEOUT); "
                "all lanes of an FFN group stop together."
            )
        return min(remaining, LATE_SHUTDOWN_S)

    def _receive(self) -> None:
        """Take what has arrived on the step connections, without waiting."""
        assert self._router is not None  # noqa: S101 - listen() has run
        for _ in range(_BATCH):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                identity, frame = frames
                message = m.decode(frame)
            except (ValueError, m.MalformedMessageError):
                self.statistics.dropped["malformed"] += 1
                continue
            member = self._identities.get(identity)
            if member is None:
                self._answer_stranger(identity, message)
            else:
                self._take(member, message)

    def _take(self, member: m.MemberId, message: m.Message) -> None:
        if (
            isinstance(message, m.Step | m.Profile | m.Drain | m.Shutdown)
            and self._merger is not None
            and member.index in self._lanes
            and member.role is Role.ATTENTION
        ):
            self._merger.push(member.index, message)
        elif isinstance(message, m.Ready) and message.epoch == self.membership.epoch:
            self._ready_members[member] = message.data
        else:
            self.statistics.dropped["unexpected"] += 1

    def _answer_stranger(self, identity: bytes, message: m.Message) -> None:
        """A connection that is no member: admit an expected lane, refuse whoever knocks, drop the rest."""
        if isinstance(message, m.Hello):
            self._refuse(identity, message)
        elif (
            isinstance(message, m.Attach)
            and message.epoch == self.membership.epoch
            and self._host is not None
            and message.member.role is Role.ATTENTION
            and message.member.index in self._lanes
            and message.member not in self._identities.values()
        ):
            self._identities[identity] = message.member
            self._reply(identity, m.Attached(message.epoch))
        else:
            self.statistics.dropped["foreign"] += 1

    def _refuse(self, identity: bytes, message: m.Hello) -> None:
        assert self._me is not None and self._fingerprint is not None  # noqa: S101, PT018 - listen() has run
        members = {member.id: member for member in self.membership.members}
        try:
            introduction = opened(message)
        except m.MalformedMessageError:
            self.statistics.dropped["malformed"] += 1
            return
        except ProtocolVersionMismatch as error:
            verdict: Refused | None = error
        else:
            holder = members.get(introduction.member.id)
            verdict = judge(introduction, self._fingerprint, self._me, tuple(members), holder)
        verdict = verdict or Refused(f"{self._me.id} does not admit members any more.")
        self.statistics.refused[verdict.name] += 1
        logger.warning("Refused a process that knocked while serving: %s", verdict.line())
        self._reply(identity, refusal(verdict))

    def _reply(self, identity: bytes, message: m.Message) -> None:
        assert self._router is not None  # noqa: S101 - listen() has run
        self._router.send_multipart([identity, m.encode(message)], zmq.NOBLOCK)
