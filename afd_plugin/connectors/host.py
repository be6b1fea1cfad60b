# SPDX-License-Identifier: Apache-2.0
"""What connectors that move host memory share: arenas, packing, and the order of messages.

A subclass says how the bytes of one message reach a peer. Peer 0 is the FFN leader, peer 1 + i the group's i-th lane.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from afd_plugin.config import LinkSettings, Role
from afd_plugin.connectors.base import AFDConnector, ConnectorShape
from afd_plugin.connectors.packed import Arena
from afd_plugin.plan import Exchange, RemoteUnit

FFN_PEER = 0


class HostConnector(AFDConnector):
    """One packed message per exchange and lane, sent and received while the caller waits."""

    def __init__(self, shape: ConnectorShape, settings: LinkSettings) -> None:
        super().__init__(shape, settings)
        peers = shape.lanes if shape.role is Role.FFN else 1
        self._outbound = [Arena(shape.arena_bytes, shape.dtype) for _ in range(peers)]
        self._inbound = [
            [Arena(shape.arena_bytes, shape.dtype) for _ in range(peers)] for _ in range(shape.stages)
        ]
        self._gathered = torch.empty(
            (shape.lanes * shape.max_tokens, shape.hidden_size) if peers > 1 else (0, shape.hidden_size),
            dtype=shape.dtype,
        )

    @abstractmethod
    def _transmit(self, message: torch.Tensor, peer: int) -> None:
        """Send the bytes of ``message`` (uint8, contiguous); raises ``PeerLost``."""

    @abstractmethod
    def _collect(self, message: torch.Tensor, peer: int) -> None:
        """Fill ``message`` (uint8, contiguous) with what ``peer`` sends; raises ``PeerLost``."""

    def send_hidden(
        self, exchange: Exchange, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> None:
        self.check_rows("hidden states", hidden, hidden.shape[0], self.shape.hidden_size)
        message = self._outbound[0].pack(exchange, self.shape.request_layout(unit), hidden, router_logits)
        self._send(message, FFN_PEER)

    def recv_output(self, exchange: Exchange, rows: int) -> torch.Tensor:
        layout = self.shape.answer_layout()
        arena = self._inbound[exchange.stage][0]
        self._recv(arena.message(layout, rows), FFN_PEER)
        return arena.unpack(exchange, layout, rows)[0]

    def recv_hidden(
        self, exchange: Exchange, unit: RemoteUnit, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layout = self.shape.request_layout(unit)
        parts: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for lane, count in enumerate(rows):
            if count:
                arena = self._inbound[exchange.stage][lane]
                self._recv(arena.message(layout, count), 1 + lane)
                parts.append(arena.unpack(exchange, layout, count))
        if len(parts) == 1:
            return parts[0]
        total = sum(rows)
        if not parts:
            return self._gathered[:0], None
        hidden = torch.cat([part[0] for part in parts], out=self._gathered[:total])
        logits = [part[1] for part in parts if part[1] is not None]
        return hidden, torch.cat(logits) if logits else None

    def send_output(self, exchange: Exchange, rows: Sequence[int], output: torch.Tensor) -> None:
        self.check_rows("FFN output", output, sum(rows), self.shape.hidden_size)
        layout = self.shape.answer_layout()
        start = 0
        for lane, count in enumerate(rows):
            if count:
                message = self._outbound[lane].pack(exchange, layout, output[start : start + count])
                self._send(message, 1 + lane)
                start += count

    def _send(self, message: torch.Tensor, peer: int) -> None:
        self._transmit(message, peer)
        self.counts.messages_sent += 1
        self.counts.bytes_sent += message.numel()

    def _recv(self, message: torch.Tensor, peer: int) -> None:
        self._collect(message, peer)
        self.counts.messages_received += 1
        self.counts.bytes_received += message.numel()

    @staticmethod
    def peer_name(peer: int) -> str:
        """How errors name a peer."""
        return "the FFN" if peer == FFN_PEER else f"lane {peer - 1} of this group"
