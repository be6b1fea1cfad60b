# SPDX-License-Identifier: Apache-2.0
"""``CudaIpcAFDConnector``: one host, arenas mapped between processes by CUDA IPC, kernels that push and wait.

Each end owns an arena with one slot per (stage, peer). A message is one kernel: it stores the rows into the
peer's slot and announces them by a sequence number; one small kernel waits for it. Everything is enqueued on
the caller's stream, nothing is synchronised, and a captured exchange replays unchanged, since the numbers
live in device memory and grow.

A slot needs no credit: attention sends its next request of a stage only after it received the answer to the
last one, and the FFN answers only after it has computed from the slot, so a slot is always consumed when its
sender writes it. Both ends compute straight from their slots.

Several processes may share one GPU. Without the MPS daemon the GPU then switches between them in time slices,
which costs milliseconds per exchange.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from afd_plugin.config import LinkSettings, Role
from afd_plugin.connectors import exchange_ops as ops
from afd_plugin.connectors.arena_layout import ArenaLayout
from afd_plugin.connectors.base import AFDConnector, ConnectorShape, DeviceSteps
from afd_plugin.connectors.cuda_memory import DeviceArena, HostWords, MappedArena, device_uuid, tensor_at
from afd_plugin.connectors.meeting import Meeting
from afd_plugin.errors import ConfigRefused, PeerLost, ProtocolError
from afd_plugin.plan import LOGIT_BYTES, Exchange, RemoteUnit

logger = logging.getLogger(__name__)

_FFN = "ffn"
_QUIET_S = 2.0
"""How long ``close`` lets work in flight finish by itself before it releases the waits."""

_ROUTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CudaIpcAFDConnector(AFDConnector):
    """Pushes into the peer's arena and waits on its own; see the module docstring."""

    stream_ordered = True

    def __init__(self, shape: ConnectorShape, settings: LinkSettings) -> None:
        super().__init__(shape, settings)
        ops.load_kernels()
        if shape.lanes > ops.MAX_PEERS:
            raise ConfigRefused(
                f"{shape.lanes} lanes share an FFN group; CudaIpcAFDConnector serves {ops.MAX_PEERS}."
            )
        other = Role.ATTENTION if shape.role is Role.FFN else Role.FFN
        self._own_layout = ArenaLayout.of(shape, shape.role)
        self._peer_layout = ArenaLayout.of(shape, other)
        self._peers = self._own_layout.peers
        self._arena = DeviceArena(self._own_layout.size, shape.device)
        self._control = HostWords(ops.CONTROL_WORDS)
        self._state = ops.new_state(shape.stages * self._peers, shape.device)
        # [eager, captured][stage]: forward steps as the device saw them
        self._steps = torch.zeros(2, shape.stages, dtype=torch.int64, device=shape.device)
        layout, peers, stages = self._own_layout, range(self._peers), range(shape.stages)
        self._hidden = [[self._view(layout.hidden(stage, peer)) for peer in peers] for stage in stages]
        self._logits = [
            [self._bytes(layout.logits(stage, peer), layout.logits_bytes) for peer in peers]
            for stage in stages
        ]
        rows = shape.lanes * shape.max_tokens if self._peers > 1 else 0
        self._gathered = [
            torch.empty((rows, shape.hidden_size), dtype=shape.dtype, device=shape.device) for _ in stages
        ]
        self._gathered_logits: list[torch.Tensor | None] = [None] * shape.stages
        self._aside, self._mark = torch.cuda.Stream(shape.device), torch.zeros(1, device=shape.device)
        self._router_dtypes: tuple[torch.dtype | None, ...] = shape.router_dtypes
        self._mapped: list[MappedArena] = []
        self._same_gpu = False
        self._meeting = Meeting(settings)
        self._aborted = False

    def _view(self, offset: int) -> torch.Tensor:
        shape = self.shape
        size = shape.max_tokens * shape.hidden_size * shape.itemsize
        return self._bytes(offset, size).view(shape.dtype).view(shape.max_tokens, shape.hidden_size)

    def _bytes(self, offset: int, size: int) -> torch.Tensor:
        return tensor_at(self._arena.address + offset, size, self.shape.device)

    # ------------------------------------------------------------------ meeting the peers

    def offer(self) -> dict[str, str]:
        return self._meeting.offer()

    def connect(self, data: Mapping[str, str]) -> None:
        shape = self.shape
        self._meeting.join(data, 1 + shape.lanes)
        names = [_lane(index) for index in range(shape.lanes)] if shape.lane is None else [_FFN]
        self._meeting.publish(_FFN if shape.lane is None else _lane(shape.lane), self._introduction())
        devices: set[str] = set()
        for name in names:
            document = self._meeting.collect(name)
            if document["host"] != _host():
                raise ConfigRefused(
                    f"{name} runs on another host; CudaIpcAFDConnector serves one host only, "
                    "choose P2pNcclAFDConnector."
                )
            self._mapped.append(self._map(name, document))
            devices.add(str(document["device"]))
            if shape.lane is None:
                self._agree_on_routers(name, document["router_dtypes"])
        self._same_gpu = devices == {device_uuid(shape.device)}
        # Nobody leaves before everybody has read: the FFN's end hosts the store.
        self._meeting.publish(f"{_FFN} joined" if shape.lane is None else f"{_lane(shape.lane)} joined", {})
        for name in names:
            self._meeting.collect(f"{name} joined")
        torch.cuda.synchronize(shape.device)

    def _introduction(self) -> dict[str, object]:
        names = {dtype: name for name, dtype in _ROUTER_DTYPES.items()}
        return {
            "host": _host(),
            "device": device_uuid(self.shape.device),
            "handle": self._arena.handle().hex(),
            "router_dtypes": [None if dtype is None else names[dtype] for dtype in self._router_dtypes],
        }

    def _map(self, name: str, document: Mapping[str, object]) -> MappedArena:
        try:
            return MappedArena(bytes.fromhex(str(document["handle"])), self.shape.device)
        except RuntimeError as error:
            mine = device_uuid(self.shape.device)
            where = (
                "the same GPU"
                if document["device"] == mine
                else f"GPU {document['device']} (this one is {mine})"
            )
            raise ConfigRefused(
                f"the arena of {name} on {where} cannot be mapped: {error}; GPUs of one host must see each other "
                "(peer access, and CUDA_VISIBLE_DEVICES of both processes naming both)."
            ) from error

    def _agree_on_routers(self, name: str, raw: object) -> None:
        values = raw if isinstance(raw, list) else []
        dtypes = tuple(None if value is None else _ROUTER_DTYPES[str(value)] for value in values)
        if self._router_dtypes and dtypes != self._router_dtypes:
            raise ProtocolError(
                f"{name} sends router logits as {dtypes}; other lanes as {self._router_dtypes}."
            )
        self._router_dtypes = dtypes

    # ------------------------------------------------------------------ exchanges

    def send_hidden(
        self, exchange: Exchange, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> None:
        shape, rows = self.shape, hidden.shape[0]
        self.check_rows("hidden states", hidden, rows, shape.hidden_size)
        lane = shape.lane
        if lane is None:
            raise ProtocolError("an FFN sent hidden states.")
        base, layout = self._peer_base(0), self._peer_layout
        extra = ops.Part()
        if unit.router_logits:
            self._check_logits(unit, router_logits, rows)
            assert router_logits is not None  # noqa: S101 - _check_logits refuses None
            bytes_ = rows * unit.router_logits * router_logits.dtype.itemsize
            extra = ops.Part(0, bytes_, base + layout.logits(exchange.stage, lane))
        receiver = ops.Receiver(
            payload=ops.Part(
                0, rows * shape.hidden_size * shape.itemsize, base + layout.hidden(exchange.stage, lane)
            ),
            extra=extra,
            arrived=base + layout.arrived(exchange.stage, lane),
            cell=self._cell(exchange.stage, 0),
            tag=ops.tag(exchange.unit, rows),
        )
        logits = router_logits.contiguous() if unit.router_logits and router_logits is not None else None
        if torch.cuda.is_current_stream_capturing():
            self._branch()
        self._push(hidden, logits, [receiver], self._counter(exchange))
        self._sent(1, receiver.payload.bytes + extra.bytes)

    def _branch(self) -> None:
        """A second branch in the captured step, beside the push and over before it.

        In a graph without any fork FlashAttention takes 17 microseconds on an H200 where it takes 11 behind one
        (`evidence/h200x1`); natively the shared experts make the forks. A waiting kernel must not be that branch: it
        could stand before its own push in one hardware queue.
        """
        here = torch.cuda.current_stream()
        self._aside.wait_stream(here)
        with torch.cuda.stream(self._aside):
            self._mark.zero_()
        here.wait_stream(self._aside)

    def recv_output(self, exchange: Exchange, rows: int) -> torch.Tensor:
        self._wait(exchange, {0: rows}, 0)
        return self._hidden[exchange.stage][0][:rows]

    def recv_hidden(
        self, exchange: Exchange, unit: RemoteUnit, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stage = exchange.stage
        present = {lane: count for lane, count in enumerate(rows) if count}
        if not present:
            return self._gathered[stage][:0], None
        self._wait(exchange, present, self._counter(exchange))
        if len(present) == 1:
            ((lane, count),) = present.items()
            return self._hidden[stage][lane][:count], self._logits_view(unit, stage, lane, count)
        return self._gather(unit, stage, present)

    def _gather(
        self, unit: RemoteUnit, stage: int, present: Mapping[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape, total = self.shape, sum(present.values())
        hidden = self._gathered[stage][:total]
        row = shape.hidden_size * shape.itemsize
        ops.gather(
            hidden, self._runs(present, row, [self._own_layout.hidden(stage, lane) for lane in present])
        )
        if not unit.router_logits:
            return hidden, None
        dtype = self.router_dtype(unit)
        held = self._gathered_logits[stage]
        if held is None:
            held = torch.empty(
                shape.lanes * shape.max_tokens * shape.router_logits * LOGIT_BYTES,
                dtype=torch.uint8,
                device=shape.device,
            )
            self._gathered_logits[stage] = held
        row = unit.router_logits * dtype.itemsize
        logits = held[: total * row].view(dtype).view(total, unit.router_logits)
        ops.gather(
            logits, self._runs(present, row, [self._own_layout.logits(stage, lane) for lane in present])
        )
        return hidden, logits

    def _runs(self, present: Mapping[int, int], row: int, offsets: Sequence[int]) -> list[ops.Run]:
        runs, start = [], 0
        for count, offset in zip(present.values(), offsets, strict=True):
            runs.append(ops.Run(self._arena.address + offset, start * row, count * row))
            start += count
        return runs

    def send_output(self, exchange: Exchange, rows: Sequence[int], output: torch.Tensor) -> None:
        shape = self.shape
        self.check_rows("FFN output", output, sum(rows), shape.hidden_size)
        row = shape.hidden_size * shape.itemsize
        receivers, start = [], 0
        for lane, count in enumerate(rows):
            if not count:
                continue
            base = self._peer_base(lane)
            receivers.append(
                ops.Receiver(
                    payload=ops.Part(
                        start * row, count * row, base + self._peer_layout.hidden(exchange.stage, 0)
                    ),
                    extra=ops.Part(),
                    arrived=base + self._peer_layout.arrived(exchange.stage, 0),
                    cell=self._cell(exchange.stage, lane),
                    tag=ops.tag(exchange.unit, count),
                )
            )
            start += count
        if receivers:
            self._push(output, None, receivers)
            self._sent(len(receivers), start * row)

    def _push(
        self,
        payload: torch.Tensor,
        extra: torch.Tensor | None,
        receivers: Sequence[ops.Receiver],
        counter: int = 0,
    ) -> None:
        ops.push(self._state, payload, extra, receivers, counter, self._same_gpu)

    def _wait(self, exchange: Exchange, present: Mapping[int, int], counter: int) -> None:
        senders = [
            ops.Sender(
                self._arena.address + self._own_layout.arrived(exchange.stage, peer),
                self._cell(exchange.stage, peer),
                ops.tag(exchange.unit, count),
            )
            for peer, count in present.items()
        ]
        ops.wait(self._state, self._control.address, senders, counter)
        self.counts.messages_received += len(senders)
        self.counts.bytes_received += sum(present.values()) * self.shape.hidden_size * self.shape.itemsize

    def _sent(self, messages: int, size: int) -> None:
        self.counts.messages_sent += messages
        self.counts.bytes_sent += size

    def _cell(self, stage: int, peer: int) -> int:
        return 1 + stage * self._peers + peer

    def _peer_base(self, peer: int) -> int:
        if self._aborted or not self._mapped:
            raise PeerLost("the data plane is closed or aborted; no exchange can run.")
        return self._mapped[peer].address

    def _counter(self, exchange: Exchange) -> int:
        """Where the device counts this step: once per stage, apart for steps that run from a captured graph."""
        if exchange.unit != self.shape.units[0].index:
            return 0
        captured = int(torch.cuda.is_current_stream_capturing())
        return self._steps.data_ptr() + 8 * (captured * self.shape.stages + exchange.stage)

    def _check_logits(self, unit: RemoteUnit, logits: torch.Tensor | None, rows: int) -> None:
        seen = None if logits is None else tuple(logits.shape)
        if logits is None or seen != (rows, unit.router_logits):
            raise ProtocolError(
                f"router logits are {seen}; {unit.name} wants ({rows}, {unit.router_logits})."
            )
        if logits.dtype != self.router_dtype(unit):
            raise ProtocolError(
                f"router logits of {unit.name} are {logits.dtype}, not {self.router_dtype(unit)}."
            )

    def _logits_view(self, unit: RemoteUnit, stage: int, lane: int, rows: int) -> torch.Tensor | None:
        if not unit.router_logits:
            return None
        dtype = self.router_dtype(unit)
        held = self._logits[stage][lane][: rows * unit.router_logits * dtype.itemsize]
        return held.view(dtype).view(rows, unit.router_logits)

    # ------------------------------------------------------------------ state and end

    def check(self) -> None:
        word = self._control[ops.FAULT] if self._control.address else 0
        if word:
            raise ProtocolError(f"{ops.describe_fault(word)} arrived where another message was due.")
        if self._aborted:
            raise PeerLost("the data plane was aborted after a failure.")

    def router_dtype(self, unit: RemoteUnit) -> torch.dtype:
        dtype = self._router_dtypes[unit.index] if unit.index < len(self._router_dtypes) else None
        return super().router_dtype(unit) if dtype is None else dtype

    def device_steps(self) -> DeviceSteps:
        eager, captured = self._steps.tolist()
        return DeviceSteps(tuple(eager), tuple(captured))

    def abort(self) -> None:
        """Release every wait on the GPU, and let no later push be announced: what was computed after it is no
        data.
        """
        self._aborted = True
        if self._control.address:
            self._control[ops.ABORT] = 1

    def close(self) -> None:
        if not self._arena.address:
            return
        try:
            self._drain()
            self.abort()
            torch.cuda.synchronize(self.shape.device)
            for mapped in self._mapped:
                mapped.close()
            self._hidden.clear()
            self._logits.clear()
            self._arena.close()
            self._control.close()
        except RuntimeError as error:
            # A sticky CUDA error: the context is lost, and the driver frees everything with the process.
            logger.warning("The data plane could not be released in order: %s", error)
            self._arena.address = 0
        self._meeting.close()

    def _drain(self) -> None:
        """Let work in flight end by itself for a moment, so that a clean end aborts nothing."""
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + (0.0 if self._aborted else _QUIET_S)
        while not done.query() and time.monotonic() < deadline:
            time.sleep(0.001)


def _lane(index: int) -> str:
    return f"lane {index}"


def _host() -> str:
    """This machine, as long as it is up."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
