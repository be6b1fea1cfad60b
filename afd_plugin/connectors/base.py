# SPDX-License-Identifier: Apache-2.0
"""The connector contract.

One connector object serves one end of one FFN group: the group's leader, or the leader of one of its lanes.

====================  =========  ==========================================================================
method                caller     when
====================  =========  ==========================================================================
``offer``             FFN        once, before the rendezvous; its data reaches the lanes by the membership
``connect``           both       once, after the rendezvous; FFN accepts, attention joins; bounded
``send_hidden``       attention  once per exchange
``recv_output``       attention  once per exchange, after ``send_hidden`` of the same exchange
``recv_hidden``       FFN        once per exchange
``send_output``       FFN        once per exchange, after ``recv_hidden`` of the same exchange
``check``             both       before a step, and before results of a step are handed on; cheap; raises after a fault
``abort``             any        from any thread, after a failure; waiting calls raise as soon as the transport allows
``close``             both       once; releases sockets, memory and threads; safe after ``abort``
====================  =========  ==========================================================================

Order is by (step, unit, stage) and is the caller's promise: both ends follow ``plan.schedule``. Shapes, dtypes and
devices are checked where tensors enter. What names a message is checked where it arrives: step, unit, stage and rows
over sockets, unit and rows by CUDA IPC; NCCL's messages carry nothing of the kind and rely on the order. Arenas are
allocated in the constructor from the maximum row count, so memory does not grow with the shapes a service sees. Tensors
that ``recv_hidden`` and ``recv_output`` return may be views of an arena: they stay valid until the next exchange of the
same stage is received.

A *stream-ordered* connector (CUDA) enqueues its work on the caller's current stream and returns at once: its tensors
hold data once the stream has come that far, its calls may be captured in a CUDA graph, and a failure shows in ``check``
rather than in the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from afd_plugin.config import LinkSettings, Role
from afd_plugin.errors import ProtocolError
from afd_plugin.plan import Exchange, MessageLayout, RemoteUnit


@dataclass(frozen=True)
class ConnectorShape:
    """What sizes a connector: one end of the link between ``lanes`` lanes and one FFN group.

    ``lane`` is the index of this lane within its group, or ``None`` on the FFN. ``max_tokens`` bounds the rows of one
    lane in one step (vLLM's ``max_num_batched_tokens``).
    """

    lanes: int
    lane: int | None
    max_tokens: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    units: tuple[RemoteUnit, ...]
    stages: int = 1
    router_dtypes: tuple[torch.dtype | None, ...] = ()
    """On attention with a stream-ordered connector: the type of the router logits of each unit, by its index."""

    @property
    def role(self) -> Role:
        return Role.FFN if self.lane is None else Role.ATTENTION

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def router_logits(self) -> int:
        """The widest router of any unit: what the inbound arena of an FFN must hold per row."""
        return max((unit.router_logits for unit in self.units), default=0)

    def request_layout(self, unit: RemoteUnit) -> MessageLayout:
        """Layout of a message from attention to FFN for ``unit``."""
        return MessageLayout(self.hidden_size, self.itemsize, unit.router_logits)

    def answer_layout(self) -> MessageLayout:
        """Layout of a message from FFN to attention: the rows alone."""
        return MessageLayout(self.hidden_size, self.itemsize)

    @property
    def arena_bytes(self) -> int:
        """Bytes that hold any message of one stage of one lane."""
        return MessageLayout(self.hidden_size, self.itemsize, self.router_logits).size(self.max_tokens)


@dataclass
class TransferCounts:
    """Messages and payload bytes that crossed, both directions; for metrics and tests."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class DeviceSteps:
    """Steps as the device counted them, by stage: enqueued one by one, and by replay of a captured graph."""

    eager: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()


class AFDConnector(ABC):
    """Base of all connectors; see the module docstring for who calls what."""

    stream_ordered: bool = False
    """Whether calls enqueue work on the current CUDA stream instead of doing it."""

    def __init__(self, shape: ConnectorShape, settings: LinkSettings) -> None:
        self.shape = shape
        self.settings = settings
        self.counts = TransferCounts()

    def offer(self) -> dict[str, str]:
        """Bind what peers must find and return it as opaque strings; FFN only."""
        return {}

    @abstractmethod
    def connect(self, data: Mapping[str, str]) -> None:
        """Join the group with the FFN leader's offer; raises ``RendezvousTimeout`` when a peer does not come."""

    @abstractmethod
    def send_hidden(
        self, exchange: Exchange, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> None:
        """Send ``hidden`` [rows, hidden_size] and, if the unit wants them, ``router_logits`` [rows, width]."""

    @abstractmethod
    def recv_output(self, exchange: Exchange, rows: int) -> torch.Tensor:
        """Receive the unit's output [rows, hidden_size] in the model's dtype."""

    @abstractmethod
    def recv_hidden(
        self, exchange: Exchange, unit: RemoteUnit, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Receive the lanes' rows, concatenated in lane order, and their router logits if the unit has any."""

    @abstractmethod
    def send_output(self, exchange: Exchange, rows: Sequence[int], output: torch.Tensor) -> None:
        """Return to each lane its rows of ``output`` [sum(rows), hidden_size]."""

    def check(self) -> None:  # noqa: B027 - most transports fail in the call itself
        """Raise what went wrong on the device since the last call; nothing can where calls do their work at once."""

    def router_dtype(self, unit: RemoteUnit) -> torch.dtype:
        """On the FFN, once connected: the type in which ``unit``'s router logits arrive."""
        raise ProtocolError(f"nobody has said in which type {unit.name} sends its router logits.")

    def device_steps(self) -> DeviceSteps:
        """What the device counted; waits for the device."""
        return DeviceSteps()

    @abstractmethod
    def abort(self) -> None:
        """Unblock waiting calls after a failure; callable from any thread, idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; idempotent."""

    def check_rows(self, name: str, tensor: torch.Tensor, rows: int, width: int) -> None:
        """Raise ``ProtocolError`` unless ``tensor`` is [rows, width] in the model's dtype on the connector's device."""
        shape = self.shape
        if tuple(tensor.shape) != (rows, width):
            raise ProtocolError(f"{name} is {tuple(tensor.shape)}; the step plan says ({rows}, {width}).")
        if tensor.dtype != shape.dtype:
            raise ProtocolError(f"{name} is {tensor.dtype}; the handshake agreed on {shape.dtype}.")
        if tensor.device.type != shape.device.type:
            raise ProtocolError(f"{name} is on {tensor.device}; this connector serves {shape.device}.")
