# SPDX-License-Identifier: Apache-2.0
"""``GlooAFDConnector``: the CPU lane's connector, one stateless gloo group per FFN group.

Rank 0 is the FFN leader, rank 1 + i the group's i-th lane. The group is made by vLLM's
``stateless_init_torch_distributed_process_group``, so neither role's own default group is touched, and its store
listens on a socket that the FFN leader bound itself: the port is advertised, never derived.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.utils import stateless_init_torch_distributed_process_group

from afd_plugin.config import LinkSettings, Role
from afd_plugin.connectors.base import AFDConnector, ConnectorShape
from afd_plugin.connectors.packed import Arena
from afd_plugin.errors import PeerLost
from afd_plugin.plan import Exchange, RemoteUnit

_FFN_RANK = 0
_STORE_KEY = "gloo_store"


class GlooAFDConnector(AFDConnector):
    """Blocking sends and receives of one packed message per exchange and lane over gloo."""

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
        self._timeout = timedelta(seconds=settings.exchange_timeout_s)
        self._listener: socket.socket | None = None
        self._group: ProcessGroup | None = None

    def offer(self) -> dict[str, str]:
        host = self.settings.listen.rpartition(":")[0].strip("[]") or "127.0.0.1"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen()
        port = self._listener.getsockname()[1]
        advertised = self.settings.advertise or host
        return {_STORE_KEY: f"{advertised} {port}"}

    def connect(self, data: Mapping[str, str]) -> None:
        host, port = data[_STORE_KEY].split()
        rank = _FFN_RANK if self.shape.lane is None else 1 + self.shape.lane
        group = stateless_init_torch_distributed_process_group(
            host=host,
            port=int(port),
            rank=rank,
            world_size=1 + self.shape.lanes,
            backend="gloo",
            listen_socket=self._listener,
        )
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"vLLM returned {type(group)} for a stateless group")
        self._group = group

    def send_hidden(
        self, exchange: Exchange, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> None:
        self.check_rows("hidden states", hidden, hidden.shape[0], self.shape.hidden_size)
        message = self._outbound[0].pack(exchange, self.shape.request_layout(unit), hidden, router_logits)
        self._send(message, _FFN_RANK)

    def recv_output(self, exchange: Exchange, rows: int) -> torch.Tensor:
        layout = self.shape.answer_layout()
        arena = self._inbound[exchange.stage][0]
        self._recv(arena.message(layout, rows), _FFN_RANK)
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
        try:
            self._joined().send([message], peer, 0).wait(self._timeout)
        except RuntimeError as error:
            raise self._lost("send to", peer, error) from error
        self.counts.messages_sent += 1
        self.counts.bytes_sent += message.numel()

    def _recv(self, message: torch.Tensor, peer: int) -> None:
        try:
            self._joined().recv([message], peer, 0).wait(self._timeout)
        except RuntimeError as error:
            raise self._lost("receive from", peer, error) from error
        self.counts.messages_received += 1
        self.counts.bytes_received += message.numel()

    def _joined(self) -> ProcessGroup:
        if self._group is None:
            raise PeerLost("the data plane is closed; no exchange can run.")
        return self._group

    def _lost(self, action: str, peer: int, error: RuntimeError) -> PeerLost:
        name = "the FFN" if peer == _FFN_RANK else f"lane {peer - 1} of this group"
        first_line = str(error).splitlines()[0]
        return PeerLost(f"cannot {action} {name}: {first_line}")

    def abort(self) -> None:
        """Mark the group unusable. gloo cannot interrupt a wait in progress: a dead peer's closed connection or the
        exchange timeout ends it, and the worker's failure guard ends the process if neither does in time."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
