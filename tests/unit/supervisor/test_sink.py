# SPDX-License-Identifier: Apache-2.0
"""The merged log keeps lines whole and never holds a child up."""

from __future__ import annotations

import os
import time
from pathlib import Path

from afd_plugin.supervisor.sink import MAX_LINE_BYTES, LogSink, drain_lines


def _drain(data: bytes) -> list[bytes]:
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    lines: list[bytes] = []
    with os.fdopen(reader, "rb") as stream:
        drain_lines(stream, lines.append)
    return lines


def test_lines_and_progress_bars_become_single_lines() -> None:
    assert _drain(b"one\ntwo 1%\rtwo 2%\r\nlast") == [b"one", b"two 1%", b"two 2%", b"last"]


def test_an_endless_line_is_handed_over_in_bounded_pieces() -> None:
    pieces = _drain(b"x" * (2 * MAX_LINE_BYTES + 5))
    assert b"".join(pieces) == b"x" * (2 * MAX_LINE_BYTES + 5)
    assert max(map(len, pieces)) <= MAX_LINE_BYTES


def test_lines_carry_their_role_as_prefix(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as outlet:
        sink = LogSink(outlet.fileno())
        sink.line("ffn-0", "loading")
        sink.line("attention-0", b"ready")
        sink.close()
    assert (tmp_path / "log").read_text() == "[ffn-0] loading\n[attention-0] ready\n"
    assert sink.dropped == 0


def test_a_stalled_outlet_drops_lines_and_blocks_nobody() -> None:
    reader, writer = os.pipe()
    sink = LogSink(writer)
    begun = time.monotonic()
    for _ in range(20_000):
        sink.line("ffn-0", b"y" * 100)
    assert time.monotonic() - begun < 10
    assert sink.dropped > 0
    os.close(reader)  # the writing thread gets EPIPE and goes on to the end
    sink.close()
    os.close(writer)


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    sink = LogSink(descriptor)
    for _ in range(3):
        sink.line("ffn-0", "text")
    sink.close()
    assert sink.dropped == 3
    os.close(descriptor)
