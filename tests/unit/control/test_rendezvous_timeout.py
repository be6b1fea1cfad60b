# SPDX-License-Identifier: Apache-2.0
"""Nobody comes, or somebody does not: every wait ends within its bound and says who is missing."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest
import zmq

from afd_plugin.control import AttentionControl
from afd_plugin.control import messages as m
from afd_plugin.control.address import Address
from afd_plugin.control.sockets import dial
from afd_plugin.errors import AddressRefused, RendezvousTimeout
from afd_plugin.topology import Topology
from tests.unit.control.harness import FAST, PATIENCE_S, TOKEN, fingerprint, meeting, still_waiting

SHORT = replace(FAST, rendezvous_timeout_s=1.0)
JOINABLE = replace(FAST, rendezvous_timeout_s=3.0)
"""For a host that is to give up, but only after those who come have joined."""


def test_attention_alone_times_out_and_names_what_is_missing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as freed:
        port = freed.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(RendezvousTimeout) as error:
        AttentionControl().connect(replace(SHORT, peer=f"127.0.0.1:{port}"), Topology(), 0, fingerprint())
    assert time.monotonic() - started < 3
    text = str(error.value)
    for part in (
        f"127.0.0.1:{port}",
        "Nobody answered",
        "1 s",
        "AFD_RENDEZVOUS_TIMEOUT",
        "Missing: FFN group 0",
        "AFD_PEER",
    ):
        assert part in text


def test_ffn_alone_times_out_and_names_what_is_missing() -> None:
    with meeting(settings=SHORT) as service:
        started = time.monotonic()
        error = service.start_group(0).exception(PATIENCE_S)
        assert time.monotonic() - started < 3
        assert isinstance(error, RendezvousTimeout)
        for part in (
            service.peer,
            "after 1 s",
            "AFD_RENDEZVOUS_TIMEOUT",
            "Joined: FFN group 0",
            "Missing: attention lane 0",
            "--worker-cls",
        ):
            assert part in str(error)


def test_a_missing_member_is_named_on_every_side() -> None:
    with meeting(Topology(2, 1, 2, 1), JOINABLE) as service:
        waiting = [service.start_group(0), service.start_group(1, FAST), service.start_lane(1, FAST)]
        for result in waiting:
            error = result.exception(PATIENCE_S)
            assert isinstance(error, RendezvousTimeout)
            assert "Missing: attention lane 0" in str(error)
            assert "FFN group 1" in str(error)
            assert "attention lane 1" in str(error)


def test_the_host_stays_until_a_slow_member_has_read_why_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("afd_plugin.control.rendezvous.REFUSE_GRACE_S", PATIENCE_S)
    with meeting(Topology(2, 1, 1, 1), JOINABLE) as service, zmq.Context() as context:
        host = service.start_group(0)
        slow = dial(context, Address.parse(service.peer, ""), TOKEN)
        slow.socket.rcvtimeo = round(PATIENCE_S * 1000)
        me = m.Member(m.MemberId(m.Role.ATTENTION, 0), "pid 1 on nowhere")
        assert slow.socket.poll(5000, zmq.POLLOUT)
        slow.socket.send(m.encode(m.hello(m.Introduction(me, fingerprint()))))
        assert isinstance(m.decode(slow.socket.recv()), m.Progress)
        refused = service.groups[0].control.statistics.refused
        deadline = time.monotonic() + PATIENCE_S
        while not refused[RendezvousTimeout.name]:
            assert time.monotonic() < deadline, "the host has not given up"
            time.sleep(0.02)
        assert still_waiting(host, for_s=0.5)
        refusal = m.decode(slow.socket.recv())
        slow.close()
        assert isinstance(refusal, m.Refuse)
        assert refusal.error == RendezvousTimeout.name
        assert isinstance(host.exception(PATIENCE_S), RendezvousTimeout)


def test_a_member_that_runs_out_of_time_first_says_whom_it_waited_for() -> None:
    with meeting(Topology(2, 1, 1, 1)) as service:
        host = service.start_group(0, replace(FAST, rendezvous_timeout_s=5))
        error = service.start_lane(0, replace(FAST, rendezvous_timeout_s=2)).exception(PATIENCE_S)
        assert isinstance(error, RendezvousTimeout)
        assert "Missing: attention lane 1" in str(error)
        host_error = host.exception(PATIENCE_S)
        assert "attention lane 0 had joined and left again" in str(host_error)


def test_an_address_that_accepts_but_never_shakes_hands_is_told_apart_from_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RendezvousTimeout, match="accepts connections, but its handshake"):
            AttentionControl().connect(replace(SHORT, peer=peer), Topology(), 0, fingerprint())


def test_a_zmq_service_that_is_no_afd_is_refused() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        peer = f"127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(AddressRefused, match="no AFD control plane"):
            AttentionControl().connect(replace(FAST, peer=peer), Topology(), 0, fingerprint())
