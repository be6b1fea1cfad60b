# SPDX-License-Identifier: Apache-2.0
"""Packing of one message into a byte arena on the CPU: header, hidden states, router logits.

The header is checked on arrival, so a message that belongs to another step, unit or stage is an error and never data.
Router logits travel in their own dtype inside a block sized for float32; the header says which dtype it is, because a
model whose gate lies outside the MoE runner decides it only when it runs.
"""

from __future__ import annotations

import torch

from afd_plugin.errors import ProtocolError
from afd_plugin.plan import HEADER_BYTES, Exchange, MessageLayout

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Arena:
    """A byte buffer for one message of one stage of one lane, with typed views of its parts."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.bytes = torch.zeros(size, dtype=torch.uint8)
        self.dtype = dtype
        self._header = self.bytes[:HEADER_BYTES].view(torch.int64)

    def message(self, layout: MessageLayout, rows: int) -> torch.Tensor:
        """The bytes of a message of ``rows`` rows."""
        return self.bytes[: layout.size(rows)]

    def hidden(self, layout: MessageLayout, rows: int) -> torch.Tensor:
        """View [rows, hidden_size] of the hidden states."""
        end = HEADER_BYTES + rows * layout.hidden_size * layout.itemsize
        return self.bytes[HEADER_BYTES:end].view(self.dtype).view(rows, layout.hidden_size)

    def _logits(self, layout: MessageLayout, rows: int, dtype: torch.dtype) -> torch.Tensor:
        start = layout.logits_offset(rows)
        block = self.bytes[start : start + rows * layout.router_logits * dtype.itemsize]
        return block.view(dtype).view(rows, layout.router_logits)

    def pack(
        self,
        exchange: Exchange,
        layout: MessageLayout,
        hidden: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Copy a message into the arena and return its bytes, ready to send."""
        rows = hidden.shape[0]
        logit_code = 0
        self.hidden(layout, rows).copy_(hidden)
        if layout.router_logits:
            if router_logits is None or tuple(router_logits.shape) != (rows, layout.router_logits):
                seen = None if router_logits is None else tuple(router_logits.shape)
                raise ProtocolError(
                    f"router logits are {seen}; the unit wants ({rows}, {layout.router_logits})."
                )
            if router_logits.dtype not in LOGIT_DTYPES:
                raise ProtocolError(f"router logits are {router_logits.dtype}; known are {LOGIT_DTYPES}.")
            logit_code = LOGIT_DTYPES.index(router_logits.dtype)
            self._logits(layout, rows, router_logits.dtype).copy_(router_logits)
        self._header[:5] = torch.tensor(
            (exchange.step, exchange.unit, exchange.stage, rows, logit_code), dtype=torch.int64
        )
        return self.message(layout, rows)

    def unpack(
        self, exchange: Exchange, layout: MessageLayout, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Check the header of the message in the arena and return views of its hidden states and router logits."""
        step, unit, stage, arrived, logit_code = self._header[:5].tolist()
        if (step, unit, stage, arrived) != (exchange.step, exchange.unit, exchange.stage, rows):
            raise ProtocolError(
                f"a message of step {step}, unit {unit}, stage {stage} with {arrived} rows arrived where "
                f"{exchange} with {rows} rows was due."
            )
        if not layout.router_logits:
            return self.hidden(layout, rows), None
        if not 0 <= logit_code < len(LOGIT_DTYPES):
            raise ProtocolError(f"{exchange} carries router logits of an unknown type {logit_code}.")
        return self.hidden(layout, rows), self._logits(layout, rows, LOGIT_DTYPES[logit_code])
