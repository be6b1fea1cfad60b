# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import tracemalloc
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin.config import Role
from afd_plugin.control import messages as m
from afd_plugin.errors import ProtocolError
from afd_plugin.plan import StepKind
from tests.unit.control.harness import fingerprint, plan

TEXT = st.text(max_size=40)
TEXTS = st.lists(TEXT, max_size=5).map(tuple)
EPOCH = st.integers(0, 2**63 - 1)
DATA = st.dictionaries(TEXT, TEXT, max_size=4)
ID = st.builds(m.MemberId, st.sampled_from(Role), st.integers(0, 65535))
MEMBER = st.builds(m.Member, ID, TEXT, TEXT, TEXT, DATA)
TOKENS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=2).map(tuple), max_size=8).map(tuple)
MESSAGES = st.one_of(
    st.builds(m.Hello, st.integers(0, 2**31), st.binary(max_size=100)),
    st.builds(m.Progress, TEXTS, TEXTS),
    st.builds(m.Welcome, EPOCH, st.lists(MEMBER, max_size=4).map(tuple)),
    st.builds(m.Refuse, TEXT, TEXT, TEXTS),
    st.builds(m.Attach, EPOCH, ID),
    st.builds(m.Attached, EPOCH),
    st.builds(m.Ready, EPOCH, DATA),
    st.builds(m.Go, EPOCH, st.lists(DATA, max_size=3).map(tuple)),
    st.builds(m.Step, EPOCH, st.integers(0, 2**63 - 1), st.sampled_from(StepKind), TOKENS, st.booleans()),
    st.builds(m.Profile, st.booleans(), TEXT, EPOCH),
    st.builds(m.Drain, EPOCH),
    st.builds(m.Shutdown, EPOCH),
    st.builds(m.Abort, EPOCH, ID, TEXT, TEXT, TEXTS),
    st.builds(m.AbortSeen, EPOCH),
    st.builds(m.Heartbeat, EPOCH, st.integers(0, 2**63 - 1)),
    st.builds(m.Farewell, EPOCH),
    st.builds(m.FarewellSeen, EPOCH),
)


@settings(max_examples=200, deadline=None)
@given(MESSAGES)
def test_every_message_survives_the_wire(message: m.Message) -> None:
    again = m.decode(m.encode(message))
    assert type(again) is type(message)
    assert again == message


def test_the_round_trip_covers_every_message() -> None:
    seen = {type(message) for message in _one_of_each()}
    assert seen == set(get_args(m.Message))


def _one_of_each() -> list[m.Message]:
    me = m.MemberId(Role.FFN, 0)
    return [
        m.Hello(1, b""),
        m.Progress((), ()),
        m.Welcome(1, ()),
        m.Refuse("", ""),
        m.Attach(1, me),
        m.Attached(1),
        m.Ready(1),
        m.Go(1),
        m.Step(1, 1, StepKind.REAL, ()),
        m.Profile(True),
        m.Drain(),
        m.Shutdown(),
        m.Abort(1, me, "", ""),
        m.AbortSeen(1),
        m.Heartbeat(1, 1),
        m.Farewell(1),
        m.FarewellSeen(1),
    ]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_decode_or_are_malformed_and_nothing_else(frame: bytes) -> None:
    try:
        m.decode(frame)
    except m.MalformedMessageError:
        return


@settings(max_examples=300, deadline=None)
@given(MESSAGES, st.data())
def test_damaged_messages_decode_or_are_malformed_and_nothing_else(
    message: m.Message, data: st.DataObject
) -> None:
    frame = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        m.decode(bytes(frame))
    except m.MalformedMessageError:
        return


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa4type\xa8progress\xa6joined\xdd\xff\xff\xff\xff",
        b"\x91" * 60_000,
        b"\x82\xa4type\xa4step\xa5epoch\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
        msgspec.msgpack.encode({"type": "no-such-message"}),
        msgspec.msgpack.encode({"type": "step", "epoch": -1, "step": 1, "kind": "real", "tokens": []}),
        msgspec.msgpack.encode({"type": "step", "epoch": 1, "step": 1, "kind": "other", "tokens": []}),
    ],
)
def test_lying_frames_are_malformed_and_take_no_memory(frame: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(m.MalformedMessageError):
            m.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_frame_over_the_bound_is_refused_both_ways() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        m.encode(m.Refuse("x", "y" * m.MAX_FRAME_BYTES))
    with pytest.raises(m.MalformedMessageError, match="over the limit"):
        m.decode(b"\0" * (m.MAX_FRAME_BYTES + 1))


def test_a_plan_survives_its_message() -> None:
    announced = plan(7, 3, 0, 5, kind=StepKind.CAPTURE, graph=True)
    message = m.decode(m.encode(m.Step.of(99, announced)))
    assert isinstance(message, m.Step)
    assert message.plan() == announced
    assert message.epoch == 99


def test_hello_of_another_version_still_tells_its_version() -> None:
    message = m.decode(m.encode(m.Hello(m.PROTOCOL_VERSION + 1, b"whatever a later version sends")))
    assert isinstance(message, m.Hello)
    assert message.version == m.PROTOCOL_VERSION + 1


def test_a_large_service_fits_its_directory_and_fingerprint_into_a_frame() -> None:
    members = tuple(
        m.Member(
            m.MemberId(role, i),
            f"pid 123456 on host-{i:040}",
            "[fe80::1]:65535",
            "[fe80::1]:65535",
            {"store": "x" * 40},
        )
        for role in Role
        for i in range(64)
    )
    assert m.decode(m.encode(m.Welcome(1, members))) == m.Welcome(1, members)
    introduction = m.Introduction(
        members[0], fingerprint(units=fingerprint().units * 80, capture_sizes=tuple(range(512)))
    )
    hello = m.decode(m.encode(m.hello(introduction)))
    assert isinstance(hello, m.Hello)
    assert m.introduction(hello) == introduction


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=3 * m.MAX_TEXT_CHARS), st.lists(st.text(max_size=900), max_size=200))
def test_an_abort_always_fits_whatever_the_error_says(reason: str, lines: list[str]) -> None:
    m.encode(m.Abort(1, m.MemberId(Role.FFN, 0), "x", m.clip_text(reason), m.clip_traceback(tuple(lines))))


def test_a_long_traceback_keeps_its_end() -> None:
    kept = m.clip_traceback(tuple(f"line {i}" for i in range(1000)))
    assert len(kept) == m.MAX_TRACEBACK_LINES
    assert kept[-1] == "line 999"
