# SPDX-License-Identifier: Apache-2.0
"""``P2pNcclAFDConnector``: NCCL point-to-point between GPUs of one or more hosts.

Ran on two GPUs of one host (`evidence/h200x2`); between hosts it has not run. NCCL refuses two ranks on one GPU.

Two communicators per FFN group, one per direction, so that requests and answers never block each other,
whatever their size. Each has a stream of its own; the caller's stream is joined by events, which a CUDA graph
captures as edges. Rank 0 is the FFN leader, rank 1 + i the group's i-th lane. A request is one NCCL group:
the rows of every lane land next to each other in one buffer, so nothing is gathered afterwards.

An abort ends NCCL's kernels that wait, and lets those run that need not wait: an answer computed from what never came
still travels. So the last answer of a step carries a seal, read from the host's memory when it is sent, which the abort
breaks first; a lane refuses a step with a broken seal before anything of it reaches a client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import AFDConnector, ConnectorShape, DeviceSteps
from afd_plugin.connectors.cuda_memory import device_uuid
from afd_plugin.connectors.meeting import Meeting
from afd_plugin.errors import ConfigRefused, PeerLost, ProtocolError
from afd_plugin.plan import LOGIT_BYTES, Exchange, RemoteUnit

logger = logging.getLogger(__name__)

_FFN_RANK = 0
_ABORT_S = 10.0
"""vLLM gives up waiting for an abort after 5 s."""

_WHOLE, _BROKEN = 0, 1
"""States of a step's seal."""

_ROUTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Direction:
    """One communicator, its stream, and the joins with the caller's stream."""

    def __init__(self, group: StatelessProcessGroup, device: torch.device) -> None:
        self.device = device
        self._own_stream = torch.cuda.Stream(device)
        self.communicator = PyNcclCommunicator(group, device)
        if not self.communicator.available:
            raise ConfigRefused("vLLM cannot load NCCL here (libnccl.so.2); P2pNcclAFDConnector needs it.")

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where this direction's transfers run."""
        return self._own_stream

    @contextmanager
    def transfers(self) -> Iterator[PyNcclCommunicator]:
        """One NCCL group on this direction's stream, after what the caller's stream has enqueued so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.communicator.group_start()
        try:
            yield self.communicator
        finally:
            self.communicator.group_end()

    def hold_caller(self) -> None:
        """Let the caller's stream wait for what this direction has enqueued."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


class P2pNcclAFDConnector(AFDConnector):
    """NCCL sends and receives in groups; see the module docstring."""

    stream_ordered = True
    direction_class: type[Direction] = Direction

    def __init__(self, shape: ConnectorShape, settings: LinkSettings) -> None:
        super().__init__(shape, settings)
        rows = shape.max_tokens * (shape.lanes if shape.lane is None else 1)
        self._inbound = [
            torch.empty(rows, shape.hidden_size, dtype=shape.dtype, device=shape.device)
            for _ in range(shape.stages)
        ]
        width = shape.router_logits * LOGIT_BYTES if shape.lane is None else 0
        self._logits = [
            torch.empty(rows * width, dtype=torch.uint8, device=shape.device) for _ in range(shape.stages)
        ]
        self._router_dtypes = shape.router_dtypes
        self._steps = torch.zeros(2, shape.stages, dtype=torch.int64, device=shape.device)
        self._seal = torch.full((1,), _WHOLE, dtype=torch.uint8, pin_memory=True)
        self._seals = torch.full((shape.stages,), _WHOLE, dtype=torch.uint8, device=shape.device)
        """On their way, by stage: what the FFN sends of its own seal, and what a lane receives."""
        self._received_seals = torch.full((shape.stages,), _WHOLE, dtype=torch.uint8, pin_memory=True)
        self._seen_seals = self._received_seals.numpy().data
        """The same bytes; looked at in every step without a tensor's cost."""
        self._held: list[list[torch.Tensor]] = [[] for _ in range(shape.stages)]
        """What is being sent, by stage: its memory must not be reused before the sends are joined."""
        self._meeting = Meeting(settings)
        self._requests: Direction | None = None
        self._answers: Direction | None = None
        self._aborted = False
        self._ending = threading.Lock()
        self._aborts: dict[Direction, threading.Thread] = {}

    def offer(self) -> dict[str, str]:
        return self._meeting.offer()

    def connect(self, data: Mapping[str, str]) -> None:
        shape = self.shape
        world = 1 + shape.lanes
        rank = _FFN_RANK if shape.lane is None else 1 + shape.lane
        self._meeting.join(data, world)
        names = {dtype: name for name, dtype in _ROUTER_DTYPES.items()}
        documents = self._meeting.gather(
            f"rank {rank}",
            [f"rank {other}" for other in range(world)],
            {
                "device": device_uuid(shape.device),
                "router_dtypes": [None if dtype is None else names[dtype] for dtype in self._router_dtypes],
            },
        )
        refuse_shared_gpus([str(document["device"]) for document in documents])
        if shape.lane is None:
            self._agree_on_routers(documents[1:])
        # the group hands NCCL's ids round, pickled
        group = StatelessProcessGroup(rank=rank, world_size=world, store=self._meeting.sealed_store())
        self._requests = self.direction_class(group, shape.device)
        self._answers = self.direction_class(group, shape.device)
        self._first_contact(rank)

    def _agree_on_routers(self, documents: Sequence[Mapping[str, object]]) -> None:
        found = {tuple(raw) for document in documents if isinstance(raw := document["router_dtypes"], list)}
        if len(found) != 1:
            raise ProtocolError(
                f"the lanes send router logits in different types: {sorted(map(str, found))}."
            )
        self._router_dtypes = tuple(None if name is None else _ROUTER_DTYPES[name] for name in found.pop())

    def _first_contact(self, rank: int) -> None:
        """NCCL connects a pair when it first exchanges; that must happen before any capture."""
        word = torch.zeros(1, dtype=self.shape.dtype, device=self.shape.device)
        peers = range(1, 1 + self.shape.lanes) if rank == _FFN_RANK else (_FFN_RANK,)
        for direction, sends in ((self._requests, rank != _FFN_RANK), (self._answers, rank == _FFN_RANK)):
            if direction is None:
                raise PeerLost("the data plane is not connected.")
            with direction.transfers() as nccl:
                for peer in peers:
                    if sends:
                        nccl.send(word, peer, stream=direction.stream)
                    else:
                        nccl.recv(word, peer, stream=direction.stream)
            direction.hold_caller()
        torch.cuda.synchronize(self.shape.device)

    def send_hidden(
        self, exchange: Exchange, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> None:
        self.check_rows("hidden states", hidden, hidden.shape[0], self.shape.hidden_size)
        parts = [hidden]
        if unit.router_logits:
            if router_logits is None or tuple(router_logits.shape) != (hidden.shape[0], unit.router_logits):
                seen = None if router_logits is None else tuple(router_logits.shape)
                raise ProtocolError(f"router logits are {seen}; the unit wants {unit.router_logits} per row.")
            parts.append(router_logits.contiguous())
        direction = self._joined(self._requests)
        self._held[exchange.stage] = parts
        with direction.transfers() as nccl:
            for part in parts:
                nccl.send(part, _FFN_RANK, stream=direction.stream)
        self._count_sent(1, parts)

    def recv_output(self, exchange: Exchange, rows: int) -> torch.Tensor:
        direction = self._joined(self._answers)
        output = self._inbound[exchange.stage][:rows]
        seal = self._seal_of(exchange)
        self._count_step(exchange)
        with direction.transfers() as nccl:
            nccl.recv(output, _FFN_RANK, stream=direction.stream)
            if seal is not None:
                nccl.recv(seal, _FFN_RANK, stream=direction.stream)
        direction.hold_caller()
        self._joined(self._requests).hold_caller()
        self._held[exchange.stage] = []
        if seal is not None:
            self._received_seals[exchange.stage].copy_(seal[0], non_blocking=True)
        self._count_received(1, [output])
        return output

    def recv_hidden(
        self, exchange: Exchange, unit: RemoteUnit, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        total = sum(rows)
        hidden = self._inbound[exchange.stage][:total]
        logits = self._logits_view(unit, exchange.stage, total)
        if not total:
            return hidden, logits
        direction = self._joined(self._requests)
        self._count_step(exchange)
        received: list[torch.Tensor] = []
        with direction.transfers() as nccl:
            start = 0
            for lane, count in enumerate(rows):
                for whole in (hidden, logits):
                    if count and whole is not None:
                        part = whole[start : start + count]
                        nccl.recv(part, 1 + lane, stream=direction.stream)
                        received.append(part)
                start += count
        direction.hold_caller()
        self._count_received(sum(count > 0 for count in rows), received)
        return hidden, logits

    def send_output(self, exchange: Exchange, rows: Sequence[int], output: torch.Tensor) -> None:
        self.check_rows("FFN output", output, sum(rows), self.shape.hidden_size)
        direction = self._joined(self._answers)
        seal = self._seal_of(exchange)
        if seal is not None:
            # read when the device comes here, in a replayed graph as well
            seal.copy_(self._seal, non_blocking=True)
        sent: list[torch.Tensor] = []
        with direction.transfers() as nccl:
            start = 0
            for lane, count in enumerate(rows):
                if count:
                    part = output[start : start + count]
                    nccl.send(part, 1 + lane, stream=direction.stream)
                    if seal is not None:
                        nccl.send(seal, 1 + lane, stream=direction.stream)
                    sent.append(part)
                start += count
        # The memory of the output may be reused by what is enqueued next.
        direction.hold_caller()
        self._count_sent(len(sent), sent)

    def _logits_view(self, unit: RemoteUnit, stage: int, rows: int) -> torch.Tensor | None:
        if not unit.router_logits:
            return None
        dtype = self.router_dtype(unit)
        held = self._logits[stage][: rows * unit.router_logits * dtype.itemsize]
        return held.view(dtype).view(rows, unit.router_logits)

    def _seal_of(self, exchange: Exchange) -> torch.Tensor | None:
        """Where the seal of this stage passes, ``[1]`` uint8, if this exchange is the stage's last in its step."""
        if exchange.unit != self.shape.units[-1].index:
            return None
        return self._seals[exchange.stage : exchange.stage + 1]

    def _count_step(self, exchange: Exchange) -> None:
        """Let the device count this step: once per stage, apart for steps that run from a captured graph."""
        if exchange.unit == self.shape.units[0].index:
            captured = int(torch.cuda.is_current_stream_capturing())
            self._steps[captured, exchange.stage].add_(1)

    def device_steps(self) -> DeviceSteps:
        eager, captured = self._steps.tolist()
        return DeviceSteps(tuple(eager), tuple(captured))

    def _joined(self, direction: Direction | None) -> Direction:
        if direction is None or self._aborted:
            raise PeerLost("the data plane is closed or aborted; no exchange can run.")
        return direction

    def _count_sent(self, messages: int, parts: Sequence[torch.Tensor]) -> None:
        self.counts.messages_sent += messages
        self.counts.bytes_sent += sum(part.nbytes for part in parts)

    def _count_received(self, messages: int, parts: Sequence[torch.Tensor]) -> None:
        self.counts.messages_received += messages
        self.counts.bytes_received += sum(part.nbytes for part in parts)

    def router_dtype(self, unit: RemoteUnit) -> torch.dtype:
        dtype = self._router_dtypes[unit.index] if unit.index < len(self._router_dtypes) else None
        return super().router_dtype(unit) if dtype is None else dtype

    def check(self) -> None:
        if self._aborted:
            raise PeerLost("the data plane was aborted after a failure.")
        if _BROKEN in self._seen_seals:
            raise PeerLost("the FFN had aborted its data plane before it finished this step.")

    def abort(self) -> None:
        """Abort both communicators, which ends NCCL kernels that wait for a peer."""
        if self._aborted:
            return
        self._aborted = True
        self._destroy()

    def close(self) -> None:
        self._aborted = True
        self._destroy()
        self._requests = self._answers = None
        self._meeting.close()

    def _destroy(self) -> None:
        """Abort both communicators, after the seal of every step that is not over.

        vLLM's abort can wait for kernels of the other one, so both run side by side; each is bounded by vLLM. The
        monitor's abort and the main thread's close may come at once: the second waits for the first's, and aborts what
        `connect` has made since.
        """
        with self._ending:
            self._seal.fill_(_BROKEN)
            for one in (self._requests, self._answers):
                if one is not None and one not in self._aborts:
                    self._aborts[one] = threading.Thread(target=one.communicator.destroy, daemon=True)
                    self._aborts[one].start()
            aborts = tuple(self._aborts.values())
        for thread in aborts:
            thread.join(_ABORT_S)


def refuse_shared_gpus(devices: Sequence[str]) -> None:
    """Raise ``ConfigRefused`` when two ranks of an NCCL group are on one GPU; NCCL itself fails late and
    darkly.
    """
    for rank, device in enumerate(devices):
        if device in devices[:rank]:
            names = ["the FFN", *(f"lane {lane}" for lane in range(len(devices) - 1))]
            raise ConfigRefused(
                f"{names[devices.index(device)]} and {names[rank]} are on the same GPU ({device}), which NCCL refuses; "
                "give each a GPU of its own, or choose CudaIpcAFDConnector, which shares one."
            )
