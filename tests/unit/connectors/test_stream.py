# SPDX-License-Identifier: Apache-2.0
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.stream import Stream, listening
from afd_plugin.errors import PeerLost, ProtocolError
from tests.unit.ipv6 import needs_ipv6

TOKEN, LIFE = "a shared secret", "one life"
LARGE = 24 << 20

pytestmark = pytest.mark.timeout(60)


def connected(timeout_s: float = 5.0, backlog_bytes: int = LARGE) -> tuple[Stream, Stream]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    made = [Stream(end, "the peer", timeout_s, 5.0, backlog_bytes) for end in (near, far)]
    return made[0], made[1]


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    near, far = connected()
    yield near, far
    near.close()
    far.close()


@pytest.mark.parametrize(
    ("listen", "host"), [("*:29700", "0.0.0.0"), pytest.param("[::1]:29700", "::1", marks=needs_ipv6)]
)
def test_the_data_plane_listens_where_the_control_plane_does(listen: str, host: str) -> None:
    listener, offer = listening(LinkSettings(listen=listen, advertise="ffn-host"))
    with closing(listener):
        assert listener.getsockname()[0] == host
        assert offer == f"ffn-host {listener.getsockname()[1]}"


def pattern(size: int, seed: int) -> bytes:
    return bytes((seed + i) % 251 for i in range(4096)) * (size // 4096)


def test_two_ends_that_send_more_than_any_buffer_at_once_both_go_on(ends: tuple[Stream, Stream]) -> None:
    def exchange(stream: Stream, seed: int) -> bytes:
        stream.send(memoryview(pattern(LARGE, seed)))
        arrived = bytearray(LARGE)
        stream.receive(memoryview(arrived))
        return bytes(arrived)

    with ThreadPoolExecutor(2) as pool:
        near, far = pool.map(exchange, ends, (1, 2))
    assert near == pattern(LARGE, 2)
    assert far == pattern(LARGE, 1)


def test_without_room_for_a_backlog_the_same_two_ends_give_up_in_time() -> None:
    ends = connected(timeout_s=0.3, backlog_bytes=0)

    def send(stream: Stream) -> None:
        stream.send(memoryview(pattern(LARGE, 0)))

    with ThreadPoolExecutor(2) as pool:
        for sending in [pool.submit(send, stream) for stream in ends]:
            with pytest.raises(PeerLost):
                sending.result()
    for stream in ends:
        stream.close()


def test_a_message_that_arrived_during_a_send_comes_before_later_ones(ends: tuple[Stream, Stream]) -> None:
    near, far = ends
    far.send(memoryview(b"early"))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(near.send, memoryview(pattern(LARGE, 3)))
        far.receive(memoryview(bytearray(LARGE)))
        sending.result()
    far.send(memoryview(b"later"))
    seen = bytearray(10)
    near.receive(memoryview(seen)[:3])
    near.receive(memoryview(seen)[3:])
    assert seen == b"earlylater"


def test_silence_ends_a_wait_at_its_bound() -> None:
    near, far = connected(timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"nothing arrived for 0\.3 s"):
        near.receive(memoryview(bytearray(4)))
    assert 0.25 < time.monotonic() - started < 2
    near.close()
    far.close()


def test_half_a_message_and_then_silence_ends_the_wait_too() -> None:
    near, far = connected(timeout_s=0.3)
    far.send(memoryview(b"ab"))
    with pytest.raises(PeerLost, match="2 bytes early"):
        near.receive(memoryview(bytearray(4)))
    near.close()
    far.close()


def test_a_signal_in_the_middle_of_a_message_is_no_loss(ends: tuple[Stream, Stream]) -> None:
    """A stop and its end cut a wait short in the same way, and can come to any process."""
    near, far = ends
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))

    def interrupt() -> None:
        far.send(memoryview(b"ab"))
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.01)
        far.send(memoryview(b"c"))
        time.sleep(0.1)  # lint: allow sleeping: the rest comes in two parts
        far.send(memoryview(b"d"))

    main = threading.get_ident()
    arrived = bytearray(4)
    try:
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(interrupt)
            near.receive(memoryview(arrived))
            sending.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert arrived == b"abcd"
    assert seen


def test_a_message_that_stalls_after_a_signal_ends_the_wait_at_its_bound() -> None:
    near, far = connected(timeout_s=0.5)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    far.send(memoryview(b"ab"))
    interrupt = threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGUSR1])
    started = time.monotonic()
    interrupt.start()
    try:
        with pytest.raises(PeerLost, match="2 bytes early"):
            near.receive(memoryview(bytearray(4)))
    finally:
        interrupt.join()
        signal.signal(signal.SIGUSR1, before)
    assert 0.4 < time.monotonic() - started < 5
    near.close()
    far.close()


@pytest.mark.parametrize("act", ["abort", "peer-abort", "peer-close"])
def test_a_wait_ends_at_once_when_either_end_goes(ends: tuple[Stream, Stream], act: str) -> None:
    near, far = ends
    end = {"abort": near.abort, "peer-abort": far.abort, "peer-close": far.close}[act]
    timer = threading.Timer(0.2, end)
    timer.start()
    started = time.monotonic()
    with pytest.raises(PeerLost):
        near.receive(memoryview(bytearray(4)))
    timer.join()
    assert time.monotonic() - started < 2


def test_abort_and_close_may_come_twice_and_in_any_order(ends: tuple[Stream, Stream]) -> None:
    near, _ = ends
    near.abort()
    near.close()
    near.abort()
    near.close()
    with pytest.raises(PeerLost):
        near.send(memoryview(b"x"))


def introduced(token: str, life: str) -> tuple[object, object]:
    near, far = connected()
    with ThreadPoolExecutor(2) as pool:
        called = pool.submit(near.introduce, token, life, 3, 5.0)
        known = pool.submit(far.identify, TOKEN, LIFE)
        found = (called.exception(), known.exception() or known.result())
    near.close()
    far.close()
    return found


def test_a_lane_and_its_ffn_prove_to_each_other_that_they_hold_the_token() -> None:
    assert introduced(TOKEN, LIFE) == (None, 3)


@pytest.mark.parametrize(("token", "life"), [("another", LIFE), (TOKEN, "an earlier life")])
def test_another_token_or_an_earlier_life_is_turned_away_by_both_ends(token: str, life: str) -> None:
    caller, callee = introduced(token, life)
    assert isinstance(caller, ProtocolError)
    assert isinstance(callee, (PeerLost, ProtocolError))


def test_a_caller_of_another_protocol_is_a_stranger(ends: tuple[Stream, Stream]) -> None:
    near, far = ends
    near.send(memoryview(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n" * 2))
    with pytest.raises(ProtocolError, match="stranger"):
        far.identify(TOKEN, LIFE)
