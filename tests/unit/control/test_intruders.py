# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afd_plugin.control import messages as m
from afd_plugin.control.address import Address
from afd_plugin.control.sockets import DISCONNECTED, Channel, dial
from tests.unit.control.harness import FAST, PATIENCE_S, TOKEN, Service, plan, serving

ZMTP_GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + b"\0" * 31


class Target:
    """A running service that proves, step by step, that it still works."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.step = 0
        members = service.lanes[0].control.membership.group(0)
        self.addresses = [Address.parse(text, "") for text in (members.address, members.heartbeat_address)]

    def still_works(self) -> None:
        self.step += 1
        self.service.lanes[0].do("announce", plan(self.step, 7))
        assert self.service.groups[0].do("next_event", 10) == plan(self.step, 7)
        self.service.groups[0].control.check()
        self.service.lanes[0].control.check()

    def throw(self, data: bytes, which: int) -> None:
        address = self.addresses[which]
        with socket.create_connection((address.host, address.port), 5) as connection:
            try:
                connection.sendall(data)
            except OSError:
                return  # it has been cut off while it still sent: as wished


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with serving() as service:
        yield Target(service)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=2000), st.booleans(), st.sampled_from([0, 1]))
def test_arbitrary_bytes_on_the_ports_change_nothing(
    target: Target, data: bytes, greet: bool, which: int
) -> None:
    target.throw((ZMTP_GREETING if greet else b"") + data, which)
    target.still_works()


@pytest.mark.parametrize("which", [0, 1])
def test_endless_garbage_is_cut_off_without_growing_memory(target: Target, which: int) -> None:
    process = psutil.Process()
    chunk = random.Random(1).randbytes(1 << 20)
    target.throw(chunk, which)
    before = process.memory_info().rss
    for _ in range(30):
        target.throw(ZMTP_GREETING + b"\x06" + (2**40).to_bytes(8, "big") + chunk, which)
    target.still_works()
    assert process.memory_info().rss - before < 16 << 20


def test_silent_connections_do_not_hinder_the_service(target: Target) -> None:
    address = target.addresses[0]
    held = [socket.create_connection((address.host, address.port), 5) for _ in range(100)]
    target.still_works()
    for connection in held:
        connection.close()


@pytest.fixture
def insider(target: Target) -> Iterator[Channel]:
    """A connection that holds the token but is no member."""
    context = zmq.Context()
    channel = dial(context, target.addresses[0], TOKEN)
    assert channel.socket.poll(5000, zmq.POLLOUT)
    yield channel
    channel.close()
    context.term()


def test_garbage_from_a_token_holder_is_dropped_and_counted(target: Target, insider: Channel) -> None:
    statistics = target.service.groups[0].control.statistics
    before = statistics.dropped["malformed"]
    insider.socket.send(b"")
    insider.socket.send(b"\xc1")
    insider.socket.send_multipart([b"a", b"b", b"c"])
    insider.socket.send(random.Random(2).randbytes(60_000))
    deadline = time.monotonic() + 10
    while statistics.dropped["malformed"] < before + 4 and time.monotonic() < deadline:
        target.still_works()
        time.sleep(0.02)
    assert statistics.dropped["malformed"] == before + 4


def test_an_oversized_frame_costs_its_sender_the_connection(target: Target, insider: Channel) -> None:
    insider.socket.send(b"\0" * (m.MAX_FRAME_BYTES * 4))
    seen: set[int] = set()
    while DISCONNECTED not in seen:
        assert insider.events.poll(10_000), f"still connected after {seen}"
        seen |= {event.kind for event in insider.drain_events()}
    target.still_works()


def test_a_plain_zmq_peer_without_the_token_never_reaches_a_decoder(target: Target) -> None:
    statistics = target.service.groups[0].control.statistics
    before = dict(statistics.dropped)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(target.addresses[0].endpoint)
        for _ in range(100):
            stranger.send(m.encode(m.Shutdown(0)))
        time.sleep(0.5)  # lint: allow sleeping: what must not arrive gets time to arrive
        target.still_works()
    assert dict(statistics.dropped) == before


@pytest.mark.timeout(300)  # the flood may take as long as the monitor may stay busy
def test_a_flood_of_connections_blocks_no_step_while_the_monitor_thread_is_busy() -> None:
    with serving(settings=replace(FAST, failure_timeout_s=120)) as service:
        flooded = Target(service)
        busy, release = threading.Event(), threading.Event()
        monitor = service.groups[0].control._monitor
        monitor._order(lambda: (busy.set(), release.wait(100)))
        assert busy.wait(PATIENCE_S)
        try:
            for _ in range(2500):
                flooded.throw(b"GET / HTTP/1.1\r\n\r\n", 1)
            flooded.still_works()
        finally:
            release.set()
        flooded.still_works()
