# SPDX-License-Identifier: Apache-2.0
"""Ways to move an exchange, to be measured side by side. The product's own are two of them; nothing else uses these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

from afd_plugin.config import LinkSettings
from afd_plugin.connectors import exchange_ops as ops
from afd_plugin.connectors.base import AFDConnector, ConnectorShape
from afd_plugin.connectors.cuda_ipc import CudaIpcAFDConnector
from afd_plugin.connectors.cuda_memory import tensor_at
from afd_plugin.connectors.p2p_nccl import Direction, P2pNcclAFDConnector


class CopyEngineIpc(CudaIpcAFDConnector):
    """The same arenas and arrival words; the rows are moved by the driver's copy, then announced by an empty push."""

    def _push(
        self,
        payload: torch.Tensor,
        extra: torch.Tensor | None,
        receivers: Sequence[ops.Receiver],
        counter: int = 0,
    ) -> None:
        for receiver in receivers:
            for tensor, part in ((payload, receiver.payload), (extra, receiver.extra)):
                if tensor is not None and part.bytes:
                    source = tensor.view(torch.uint8).flatten()[part.offset : part.offset + part.bytes]
                    tensor_at(part.target, part.bytes, self.shape.device).copy_(source)
        empty = [replace(receiver, payload=ops.Part(), extra=ops.Part()) for receiver in receivers]
        super()._push(payload, None, empty, counter)


class PlainDirection(Direction):
    """Sends and receives one by one on the caller's stream, which is how vLLM's communicator is used by itself."""

    @property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    @contextmanager
    def transfers(self) -> Iterator[PyNcclCommunicator]:
        yield self.communicator

    def hold_caller(self) -> None:
        """The caller's stream is where everything ran."""


class PlainNccl(P2pNcclAFDConnector):
    """NCCL without groups and without streams of its own."""

    direction_class = PlainDirection


VARIANTS: Mapping[str, Callable[[ConnectorShape, LinkSettings], AFDConnector]] = {
    "ipc-push": CudaIpcAFDConnector,
    "ipc-copy": CopyEngineIpc,
    "nccl-group": P2pNcclAFDConnector,
    "nccl-plain": PlainNccl,
}
