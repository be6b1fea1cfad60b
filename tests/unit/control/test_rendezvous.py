# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq

from afd_plugin.control import AttentionControl, FFNControl
from afd_plugin.control import messages as m
from afd_plugin.control.address import Address
from afd_plugin.control.sockets import dial
from afd_plugin.errors import (
    AddressRefused,
    ConfigRefused,
    ControlClosed,
    DuplicateMember,
    FingerprintMismatch,
    PortInUse,
    ProtocolVersionMismatch,
    RendezvousTimeout,
    TokenRejected,
    UnknownMember,
)
from afd_plugin.topology import Topology
from tests.unit.control.harness import (
    FAST,
    PATIENCE_S,
    TOKEN,
    Party,
    fingerprint,
    meeting,
    plan,
    serving,
    still_waiting,
)
from tests.unit.ipv6 import needs_ipv6


@pytest.mark.parametrize(
    "topology",
    [
        Topology(1, 1, 1, 1),
        Topology(2, 1, 1, 1),
        Topology(1, 2, 1, 2),
        Topology(2, 1, 2, 1),
        Topology(4, 1, 2, 1),
        Topology(8, 1, 4, 1),
    ],
    ids=lambda topology: f"dp{topology.attention_dp}-dp{topology.ffn_dp}",
)
def test_every_member_learns_the_same_life_and_directory(topology: Topology) -> None:
    with serving(topology) as service:
        memberships = [party.control.membership for party in [*service.groups, *service.lanes]]
        assert len({membership.epoch for membership in memberships}) == 1
        assert all(membership.members == memberships[0].members for membership in memberships)
        assert [str(x.me) for x in memberships] == [f"FFN group {i}" for i in range(topology.ffn_dp)] + [
            f"attention lane {i}" for i in range(topology.attention_dp)
        ]
        addresses = {group.address for group in (memberships[0].group(i) for i in range(topology.ffn_dp))}
        assert len(addresses) == topology.ffn_dp
        assert [data["store"] for data in memberships[-1].data] == [
            f"store of {i}" for i in range(topology.ffn_dp)
        ]


def test_each_life_has_an_epoch_of_its_own() -> None:
    epochs = set()
    for _ in range(3):
        with serving() as service:
            epochs.add(service.lanes[0].control.membership.epoch)
    assert len(epochs) == 3


@pytest.mark.parametrize("listen", [pytest.param("[::1]:0", marks=needs_ipv6), "127.0.0.7:0", "localhost:0"])
def test_other_loopback_addresses_work_also_for_groups_that_are_not_the_host(listen: str) -> None:
    with serving(Topology(2, 1, 2, 1), replace(FAST, listen=listen)) as service:
        host = listen.rpartition(":")[0]
        for index in range(2):
            group = service.lanes[0].control.membership.group(index)
            assert group.address.startswith(host + ":")
            assert group.heartbeat_address.startswith(host + ":")


def test_groups_on_different_addresses_are_found_by_the_directory_alone() -> None:
    with meeting(Topology(2, 1, 2, 1)) as service:
        waiting = [
            service.start_group(0, replace(FAST, listen="127.0.0.2:0")),
            service.start_group(1, replace(FAST, listen="127.0.0.3:0")),
            service.start_lane(0),
            service.start_lane(1),
        ]
        for result in waiting:
            result.result(PATIENCE_S)
        assert service.lanes[1].control.membership.group(1).address.startswith("127.0.0.3:")
        service.ready()


def test_a_wildcard_is_advertised_under_the_given_name() -> None:
    with serving(settings=replace(FAST, listen="*:0", advertise="127.0.0.1")) as service:
        assert service.lanes[0].control.membership.group(0).address.startswith("127.0.0.1:")


def test_a_wildcard_without_a_name_to_advertise_is_refused() -> None:
    with pytest.raises(AddressRefused, match="AFD_ADVERTISE"):
        FFNControl().listen(replace(FAST, listen="*:0"), Topology(), 0, fingerprint())


@pytest.mark.parametrize(("listen", "advertise"), [("*:0", "h"), ("192.0.2.1:0", "")])
def test_an_empty_token_is_refused_beyond_loopback(listen: str, advertise: str) -> None:
    settings = replace(FAST, listen=listen, advertise=advertise, token="", peer="192.0.2.1:7")
    with pytest.raises(ConfigRefused, match=r"AFD_LISTEN.*AFD_TOKEN is empty"):
        FFNControl().listen(settings, Topology(), 0, fingerprint())
    with pytest.raises(ConfigRefused, match=r"AFD_PEER.*AFD_TOKEN is empty"):
        AttentionControl().connect(settings, Topology(), 0, fingerprint())


def test_an_empty_token_is_enough_on_loopback() -> None:
    with serving(settings=replace(FAST, token="")):
        pass


@pytest.mark.parametrize("peer", ["", "127.0.0.1:0", "nonsense"])
def test_a_peer_that_cannot_be_dialled_is_refused_at_once(peer: str) -> None:
    with pytest.raises((ConfigRefused, AddressRefused), match="AFD_PEER"):
        AttentionControl().connect(replace(FAST, peer=peer), Topology(), 0, fingerprint())


def test_a_port_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"Port {port} of 127.0.0.1 is in use.*AFD_LISTEN"):
            FFNControl().listen(replace(FAST, listen=f"127.0.0.1:{port}"), Topology(), 0, fingerprint())


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(AddressRefused, match=r"192\.0\.2\.1.*cannot be bound"):
        FFNControl().listen(replace(FAST, listen="192.0.2.1:0"), Topology(), 0, fingerprint())


# ---------------------------------------------------------------------- the wrong ones come


def test_a_mismatch_is_refused_to_everyone_with_a_diff() -> None:
    with meeting(Topology(2, 1, 2, 1)) as service:
        waiting = [service.start_group(0), service.start_group(1), service.start_lane(1)]
        assert still_waiting(*waiting, for_s=0.3)
        waiting.append(service.start_lane(0, dtype="torch.float16", hidden_size=128))
        for result in waiting:
            error = result.exception(PATIENCE_S)
            assert isinstance(error, FingerprintMismatch)
            assert error.exit_code == 2
            assert error.differences == (
                "dtype: FFN group 0 has torch.bfloat16, attention lane 0 has torch.float16",
                "hidden_size: FFN group 0 has 64, attention lane 0 has 128",
            )
            assert all(line in str(error) for line in error.differences)


def test_a_member_that_comes_just_after_a_mismatch_is_told_as_well() -> None:
    with meeting(Topology(2, 1, 1, 1)) as service:
        host = service.start_group(0)
        first = service.start_lane(0, dtype="torch.float16")
        assert isinstance(first.exception(PATIENCE_S), FingerprintMismatch)
        second = service.start_lane(1, dtype="torch.float16")
        assert isinstance(second.exception(PATIENCE_S), FingerprintMismatch)
        assert isinstance(host.exception(PATIENCE_S), FingerprintMismatch)


def test_a_wrong_token_is_refused_by_name_and_disturbs_nobody() -> None:
    with meeting() as service:
        host = service.start_group(0)
        started = time.monotonic()
        error = service.start_lane(0, replace(FAST, token="guess")).exception(PATIENCE_S)
        assert isinstance(error, TokenRejected)
        assert time.monotonic() - started < 5
        assert "AFD_TOKEN" in str(error)
        assert "guess" not in str(error)
        assert TOKEN not in str(error)
        assert not host.done()
        service.start_lane(0).result(PATIENCE_S)
        host.result(PATIENCE_S)
        assert service.groups[0].control.statistics.strangers >= 3


def test_a_wrong_token_shows_in_the_timeout_of_the_host() -> None:
    with meeting() as service:
        host = service.start_group(0, replace(FAST, rendezvous_timeout_s=3))
        service.start_lane(0, replace(FAST, token="guess"))
        assert "AFD_TOKEN" in str(host.exception(PATIENCE_S))


def test_the_second_of_two_equal_lanes_is_refused_and_the_first_stays() -> None:
    with meeting(Topology(2, 1, 1, 1)) as service:
        waiting = [service.start_group(0), service.start_lane(0)]
        assert still_waiting(*waiting, for_s=0.3)
        error = service.start_lane(0).exception(PATIENCE_S)
        assert isinstance(error, DuplicateMember)
        assert "attention lane 0 is already pid" in str(error)
        waiting.append(service.start_lane(1))
        for result in waiting:
            result.result(PATIENCE_S)


def test_a_second_host_of_the_same_rendezvous_is_refused() -> None:
    with meeting(Topology(2, 1, 2, 1)) as service:
        service.start_group(0)
        group = service.start_group(1)
        assert still_waiting(group, for_s=0.3)
        assert isinstance(service.start_group(1).exception(PATIENCE_S), DuplicateMember)
        assert not group.done()
        for result in [service.start_lane(0), service.start_lane(1), group]:
            result.result(PATIENCE_S)


def test_a_member_that_the_topology_does_not_have_is_refused() -> None:
    with meeting() as service:
        host = service.start_group(0)
        service.topology = Topology(4, 1, 1, 1)  # the fingerprint still says one lane
        assert isinstance(service.start_lane(3).exception(PATIENCE_S), UnknownMember)
        assert not host.done()
        service.start_lane(0).result(PATIENCE_S)


def test_a_member_that_died_while_it_waited_may_come_again() -> None:
    with meeting(Topology(2, 1, 1, 1)) as service:
        host = service.start_group(0)
        context = zmq.Context()
        dead = dial(context, Address.parse(service.peer, ""), TOKEN)
        me = m.Member(m.MemberId(m.Role.ATTENTION, 0), "pid 1 on nowhere")
        assert dead.socket.poll(5000, zmq.POLLOUT)
        dead.socket.send(m.encode(m.hello(m.Introduction(me, fingerprint()))))
        assert isinstance(m.decode(dead.socket.recv()), m.Progress)
        dead.close()
        context.term()
        assert still_waiting(host, for_s=0.3)
        waiting = [host, service.start_lane(0), service.start_lane(1)]
        for result in waiting:
            result.result(PATIENCE_S)


@pytest.fixture
def knock() -> Iterator[object]:
    context = zmq.Context()

    def ask(address: str, message: m.Message) -> m.Message:
        channel = dial(context, Address.parse(address, ""), TOKEN)
        try:
            assert channel.socket.poll(5000, zmq.POLLOUT)
            channel.socket.send(m.encode(message))
            assert channel.socket.poll(5000)
            return m.decode(channel.socket.recv())
        finally:
            channel.close()

    yield ask
    context.term()


def test_another_protocol_version_is_refused_by_name(knock) -> None:  # type: ignore[no-untyped-def]
    with meeting() as service:
        host = service.start_group(0)
        answer = knock(service.peer, m.Hello(m.PROTOCOL_VERSION + 1, b"?"))
        assert answer.error == ProtocolVersionMismatch.name
        assert "same afd-plugin" in answer.message
        service.start_lane(0).result(PATIENCE_S)
        host.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("changes", "kind"), [({}, DuplicateMember), ({"dtype": "torch.float16"}, FingerprintMismatch)]
)
def test_whoever_knocks_at_a_running_service_is_refused_and_it_goes_on(
    changes: dict[str, str], kind: type
) -> None:
    with serving() as service:
        event = service.groups[0].start("next_event")
        late = service.start_lane(0, **changes)
        assert isinstance(late.exception(PATIENCE_S), kind)
        service.lanes.pop().close()
        service.lanes[0].do("announce", plan(1, 5))
        assert event.result(PATIENCE_S) == plan(1, 5)


# ---------------------------------------------------------------------- ready


def test_ready_waits_for_everyone_and_hands_out_late_data() -> None:
    with meeting(Topology(2, 1, 1, 1)) as service:
        waiting = [service.start_group(0), service.start_lane(0), service.start_lane(1)]
        for result in waiting:
            result.result(PATIENCE_S)
        lanes, (group,) = service.lanes, service.groups
        lanes[0].do("ready")
        group.do("ready", {"late": "yes"})
        early = [lanes[0].start("wait_ready"), group.start("wait_ready")]
        assert still_waiting(*early, for_s=0.3)
        lanes[1].do("ready")
        for result in [*early, lanes[1].start("wait_ready")]:
            assert dict(result.result(PATIENCE_S).data[0]) == {"store": "store of 0", "late": "yes"}


def test_a_member_that_never_gets_ready_is_named_on_every_side() -> None:
    with meeting(Topology(2, 1, 1, 1)) as service:
        for result in [service.start_group(0), service.start_lane(0), service.start_lane(1)]:
            result.result(PATIENCE_S)
        for party in (service.groups[0], service.lanes[0]):
            party.do("ready")
        lane = service.lanes[0].start("wait_ready")
        error = service.groups[0].start("wait_ready", 0.5).exception(PATIENCE_S)
        for failed in (error, lane.exception(PATIENCE_S)):
            assert isinstance(failed, RendezvousTimeout)
            assert "attention lane 1" in str(failed)
            assert "AFD_READY_TIMEOUT" in str(failed)


def test_a_control_is_used_once() -> None:
    with serving() as service:
        party: Party = service.lanes[0]
        with pytest.raises(ControlClosed):
            party.do("connect", FAST, Topology(), 0, fingerprint())
        with pytest.raises(ControlClosed, match="thread"):
            party.control.announce(plan(1, 5))
