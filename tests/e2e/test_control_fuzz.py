# SPDX-License-Identifier: Apache-2.0
"""Ten minutes of mutated frames and bytes against both control ports of a live control plane (marker `full`).

Every frame whose handling is of a new kind is kept in `tests/unit/control/corpus.json`, which a unit test replays.
"""

import json
import os
import random
import re
import socket
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from afd_plugin.config import Role
from afd_plugin.control import messages as m
from afd_plugin.control.sockets import dial
from afd_plugin.plan import StepKind
from tests.unit.control.harness import FAST, TOKEN, fingerprint, serving
from tests.unit.control.test_intruders import ZMTP_GREETING, Target

CORPUS = Path(__file__).parents[1] / "unit" / "control" / "corpus.json"
ME = m.MemberId(Role.ATTENTION, 0)
SEEDS = [
    m.encode(message)
    for message in (
        m.hello(m.Introduction(m.Member(ME, "x", "127.0.0.1:1", "", {"a": "b"}), fingerprint())),
        m.Welcome(1, (m.Member(ME, "x"),)),
        m.Refuse("refused", "no", ("a", "b")),
        m.Attach(1, ME),
        m.Ready(1, {"k": "v"}),
        m.Go(1, ({"k": "v"},)),
        m.Step(1, 5, StepKind.REAL, ((7,), (0,))),
        m.Profile(True, "p", 1),
        m.Drain(1),
        m.Shutdown(1),
        m.Abort(1, ME, "peer-lost", "reason", ("line",)),
        m.Heartbeat(1, 3),
        m.Farewell(1),
    )
]


def signature(frame: bytes) -> str:
    """What kind of thing a frame is to the decoder, numbers and paths within it left out."""
    try:
        return type(m.decode(frame)).__name__
    except m.MalformedMessageError as error:
        text = str(error.__cause__ or error).partition("does not decode:")[2]
        return re.sub(r"'.*'|\".*\"|\d+", "N", text, flags=re.DOTALL).strip()


def mutate(generator: random.Random, frame: bytes) -> bytes:
    """One of the usual mutations: flips, cuts, insertions, repetitions, a splice, a raw value, deep nesting."""
    data = bytearray(frame)
    for _ in range(generator.randrange(1, 5)):
        kind = generator.randrange(7)
        at = generator.randrange(len(data) + 1)
        if kind == 0 and data:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del data[at : at + generator.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = generator.randbytes(generator.randrange(1, 9))
        elif kind == 3:
            data[at:at] = data[at : at + 40] * generator.randrange(1, 4)
        elif kind == 4:
            data[at:] = generator.choice(SEEDS)[at:]
        elif kind == 5:
            value = generator.choice([None, -1, 2**64 - 1, 1.5, "", b"x", [], {}, [[[]]], True])
            data[at : at + 1] = msgspec.msgpack.encode(value)
        else:
            data[at:at] = generator.choice([b"\x91", b"\x81\xa1a"]) * generator.randrange(1, 2000)
    return bytes(data[: m.MAX_FRAME_BYTES])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_minutes_of_mutated_frames_crash_nothing_and_grow_nothing() -> None:
    seconds = float(os.environ.get("AFD_FUZZ_S", "600"))
    seed = int(os.environ.get("AFD_FUZZ_SEED", "1"))
    generator = random.Random(seed)
    pool = [*SEEDS]
    known = {signature(frame): frame for frame in pool}
    process = psutil.Process()
    frames, memory = 0, 0
    with serving(settings=FAST) as service, zmq.Context() as context:
        target = Target(service)
        channels = [dial(context, address, TOKEN) for address in target.addresses]
        for channel in channels:
            assert channel.socket.poll(5000, zmq.POLLOUT)
        deadline = time.monotonic() + seconds
        warm = time.monotonic() + seconds / 5
        while time.monotonic() < deadline:
            for _ in range(200):
                frame = mutate(generator, generator.choice(pool))
                kind = signature(frame)
                if kind not in known and len(frame) < 400:
                    known[kind] = frame
                    pool.append(frame)
                channel = generator.choice(channels)
                if channel.socket.poll(1000, zmq.POLLOUT):
                    channel.socket.send(frame, zmq.NOBLOCK)
                    frames += 1
            with socket.create_connection(("127.0.0.1", target.addresses[0].port), 5) as raw:
                raw.sendall(generator.choice([b"", ZMTP_GREETING]) + generator.choice(pool))
            for channel in channels:
                list(channel.drain_events())
                while channel.socket.poll(0):
                    channel.socket.recv(zmq.NOBLOCK)
            target.still_works()
            if not memory and time.monotonic() > warm:
                memory = process.memory_info().rss
        for channel in channels:
            channel.close()
        grown = process.memory_info().rss - memory
        statistics = service.groups[0].control.statistics
        reached = sum(statistics.dropped.values()) + sum(statistics.refused.values())
    assert reached > frames / 4, f"of {frames} frames only {reached} reached a decoder"
    print(f"fuzz: {frames} frames, {len(known)} kinds, {grown / 2**20:.1f} MiB grown after warm-up")
    assert frames > 100 * seconds
    assert grown < 16 << 20
    if os.environ.get("AFD_FUZZ_KEEP"):
        content = {kind: frame.hex() for kind, frame in sorted(known.items())}
        CORPUS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
