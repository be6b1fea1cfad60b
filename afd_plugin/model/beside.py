# SPDX-License-Identifier: Apache-2.0
"""Shared experts on attention: computed while the rows are with the FFN.

On a GPU they run on vLLM's own auxiliary stream, so that neither the rows nor the answer waits for them. On a CPU the
exchange blocks the thread, so they are computed before it, which costs their time and proves the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from vllm.utils.torch_utils import aux_stream, current_stream


class Beside:
    """The shared experts of one MoE layer. Not a module: they belong to the block that made them."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts
        self._stream = aux_stream()

    @contextmanager
    def running(self, hidden: torch.Tensor) -> Iterator[Callable[[], torch.Tensor]]:
        """Compute the output for ``hidden`` [rows, hidden_size] beside what is enclosed; call the yielded function
        afterwards to have it.
        """
        if self._stream is None:
            output: torch.Tensor = self._experts(hidden)
            yield lambda: output
            return
        caller, stream = current_stream(), self._stream
        hidden.record_stream(stream)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            output = self._experts(hidden)
        yield lambda: output
        caller.wait_stream(stream)
