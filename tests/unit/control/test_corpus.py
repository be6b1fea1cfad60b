# SPDX-License-Identifier: Apache-2.0
"""The frames that fuzzing (tests/e2e/test_control_fuzz.py) found to be each of a kind of its own."""

from __future__ import annotations

import json
from pathlib import Path

import zmq

from afd_plugin.control import messages as m
from afd_plugin.control.sockets import dial
from tests.unit.control.harness import TOKEN, serving
from tests.unit.control.test_intruders import Target

CORPUS = {
    kind: bytes.fromhex(frame)
    for kind, frame in json.loads(Path(__file__).with_name("corpus.json").read_text(encoding="utf-8")).items()
}


def test_each_frame_is_a_message_or_malformed_and_nothing_else() -> None:
    assert len(CORPUS) >= 30
    for kind, frame in CORPUS.items():
        try:
            assert type(m.decode(frame)).__name__ == kind
        except m.MalformedMessageError:
            assert " " in kind, f"{kind} did decode when it was kept"


def test_from_a_token_holder_that_is_no_member_none_of_them_changes_anything() -> None:
    with serving() as service, zmq.Context() as context:
        target = Target(service)
        for address in target.addresses:
            channel = dial(context, address, TOKEN)
            assert channel.socket.poll(5000, zmq.POLLOUT)
            for frame in CORPUS.values():
                assert channel.socket.poll(5000, zmq.POLLOUT)
                channel.socket.send(frame, zmq.NOBLOCK)
            target.still_works()
            channel.close()
