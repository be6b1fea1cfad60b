# SPDX-License-Identifier: Apache-2.0
"""The exchange kernels as typed calls: what each integer of the operators in ``csrc/ops.cpp`` means.

All run on the current stream of the state's device, synchronise nothing, and may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from afd_plugin.connectors import extension

CELL_WORDS = 32
"""int32 words of one cell of the state tensor; cell 0 belongs to the connector, the others to (peer, stage).
"""

CONTROL_WORDS = 2
ABORT, FAULT = 0, 1
"""Indices into the host words: a wait stops when ``ABORT`` is not zero, and reports a wrong message in
``FAULT``.
"""

FAULT_MARK = 1 << 63
MAX_PEERS = 8
_ROW_BITS = 20
MAX_ROWS, MAX_UNITS = 1 << _ROW_BITS, 1 << 12


def load_kernels() -> None:
    """Register the operators; raises ``ConfigRefused`` where the extension was not built."""
    extension.load()


def tag(unit: int, rows: int) -> int:
    """The name of a message within its stage; what arrives under another name is a fault, never data."""
    if not (0 <= unit < MAX_UNITS and 0 < rows < MAX_ROWS):
        raise ValueError(f"unit {unit} with {rows} rows cannot be named in a message")
    return unit << _ROW_BITS | rows


def describe_fault(word: int) -> str:
    """The message that a fault word stands for."""
    name = (word & ~FAULT_MARK) >> 32
    return f"unit {name >> _ROW_BITS} with {name & (MAX_ROWS - 1)} rows, sequence number {word & 0xFFFFFFFF}"


def new_state(cells: int, device: torch.device) -> torch.Tensor:
    """The counters of ``cells`` (peer, stage) pairs, all zero."""
    return torch.zeros((cells + 1) * CELL_WORDS, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Part:
    """Bytes of a payload and where they go in a peer's arena."""

    offset: int = 0
    bytes: int = 0
    target: int = 0


@dataclass(frozen=True)
class Receiver:
    """One receiver of a push."""

    payload: Part
    extra: Part
    arrived: int
    cell: int
    tag: int

    def fields(self) -> tuple[int, ...]:
        payload, extra = self.payload, self.extra
        return (
            payload.offset, payload.bytes, payload.target, extra.offset, extra.bytes, extra.target,
            self.arrived, self.cell, self.tag,
        )  # fmt: skip


@dataclass(frozen=True)
class Sender:
    """One sender that a wait expects."""

    arrived: int
    cell: int
    tag: int


@dataclass(frozen=True)
class Run:
    """A run of bytes at a device address and where it goes in a gathered tensor."""

    source: int
    offset: int
    bytes: int


def push(
    state: torch.Tensor,
    payload: torch.Tensor,
    extra: torch.Tensor | None,
    receivers: Sequence[Receiver],
    counter: int = 0,
    same_gpu: bool = False,
) -> None:
    """Copy parts of ``payload`` and ``extra`` to every receiver and announce each message when it is complete.

    ``counter`` is the device address of a 64-bit number to increment, or 0. ``same_gpu`` says that all receivers
    are processes on this GPU, which need a narrower and faster fence.
    """
    fields = [field for receiver in receivers for field in receiver.fields()]
    torch.ops.afd_plugin.push(state, payload, extra, fields, counter, same_gpu)


def wait(state: torch.Tensor, control: int, senders: Sequence[Sender], counter: int = 0) -> None:
    """Hold the stream until every sender's next message is here, or until the host asks to abort."""
    fields = [field for sender in senders for field in (sender.arrived, sender.cell, sender.tag)]
    torch.ops.afd_plugin.wait(state, control, fields, counter)


def gather(out: torch.Tensor, runs: Sequence[Run]) -> None:
    """Copy runs of bytes next to each other."""
    torch.ops.afd_plugin.gather(out, [field for run in runs for field in (run.source, run.offset, run.bytes)])


def combine(out: torch.Tensor, sources: Sequence[int]) -> None:
    """``out`` = the sum of tensors like it at these addresses: added in float32 in this order, rounded once."""
    torch.ops.afd_plugin.combine(out, list(sources))
