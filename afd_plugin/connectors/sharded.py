# SPDX-License-Identifier: Apache-2.0
"""Attention's end where the experts are split over several FFN processes that share no vLLM world.

One connector per shard, each an ordinary link between a lane and one FFN process. Every shard gets the same rows and
returns the part of the output that its own experts contribute; the parts are added in float32 in the order of the
shards and rounded once, whatever the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import AFDConnector, ConnectorShape, DeviceSteps
from afd_plugin.connectors.exchange_ops import MAX_PEERS
from afd_plugin.errors import ConfigRefused, ProtocolError
from afd_plugin.plan import Exchange, RemoteUnit

_SEPARATOR = ":"
Make = Callable[[ConnectorShape, LinkSettings], AFDConnector]


def of_shard(shard: int, offer: Mapping[str, str]) -> dict[str, str]:
    """A shard's offer, under names of its own, so that the offers of all shards fit into one mapping."""
    return {f"{shard}{_SEPARATOR}{key}": value for key, value in offer.items()}


class ShardedConnector(AFDConnector):
    """Sends to every shard, and adds what they answer. Attention only."""

    def __init__(self, make: Make, shape: ConnectorShape, settings: LinkSettings, shards: int) -> None:
        super().__init__(shape, settings)
        if shape.lane is None:
            raise ProtocolError("an FFN shard has one link to each lane, and needs no others.")
        if shape.device.type == "cuda" and shards > MAX_PEERS:
            raise ConfigRefused(
                f"The experts are split over {shards} FFN processes; on a GPU the parts of {MAX_PEERS} are added."
            )
        self._links = [make(shape, settings) for _ in range(shards)]
        self.stream_ordered = self._links[0].stream_ordered
        self._sums = [
            torch.empty(shape.max_tokens, shape.hidden_size, dtype=shape.dtype, device=shape.device)
            for _ in range(shape.stages)
        ]

    def connect(self, data: Mapping[str, str]) -> None:
        """``data`` are the offers of all shards, named by :func:`of_shard`."""
        for shard, link in enumerate(self._links):
            prefix = f"{shard}{_SEPARATOR}"
            link.connect(
                {key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)}
            )

    def send_hidden(
        self, exchange: Exchange, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> None:
        for link in self._links:
            link.send_hidden(exchange, unit, hidden, router_logits)

    def recv_output(self, exchange: Exchange, rows: int) -> torch.Tensor:
        parts = [link.recv_output(exchange, rows) for link in self._links]
        total = self._sums[exchange.stage][:rows]
        add(parts, total)
        self._count()
        return total

    def _count(self) -> None:
        each = [link.counts for link in self._links]
        self.counts.messages_sent = sum(counts.messages_sent for counts in each)
        self.counts.messages_received = sum(counts.messages_received for counts in each)
        self.counts.bytes_sent = sum(counts.bytes_sent for counts in each)
        self.counts.bytes_received = sum(counts.bytes_received for counts in each)

    def recv_hidden(
        self, exchange: Exchange, unit: RemoteUnit, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise ProtocolError("attention does not receive hidden states.")

    def send_output(self, exchange: Exchange, rows: Sequence[int], output: torch.Tensor) -> None:
        raise ProtocolError("attention does not send outputs.")

    def check(self) -> None:
        for link in self._links:
            link.check()

    def router_dtype(self, unit: RemoteUnit) -> torch.dtype:
        return self._links[0].router_dtype(unit)

    def device_steps(self) -> DeviceSteps:
        return self._links[0].device_steps()

    def abort(self) -> None:
        for link in self._links:
            link.abort()

    def close(self) -> None:
        for link in self._links:
            link.close()


def add(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out`` = the sum of ``parts``: added in float32 in this order, rounded once."""
    if out.device.type == "cuda":
        from afd_plugin.connectors import exchange_ops

        exchange_ops.combine(out, [part.data_ptr() for part in parts])
        return
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total = total + part
    out.copy_(total)
