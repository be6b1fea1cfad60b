# SPDX-License-Identifier: Apache-2.0
"""Where everything lies in the arenas of ``CudaIpcAFDConnector``: arithmetic that both ends do alike."""

from __future__ import annotations

from dataclasses import dataclass

from afd_plugin.config import Role
from afd_plugin.connectors.base import ConnectorShape
from afd_plugin.plan import LOGIT_BYTES

_ALIGNMENT = 256
_WORD_STRIDE = 128
"""Bytes between arrival words, so that no two share a cache line."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class ArenaLayout:
    """Where slots and arrival words lie in one end's arena; byte offsets.

    ``peers`` is the number of lanes on the FFN and 1 on attention; ``logits`` the widest router, 0 on
    attention.
    """

    stages: int
    peers: int
    hidden_bytes: int
    logits_bytes: int

    @classmethod
    def of(cls, shape: ConnectorShape, role: Role) -> ArenaLayout:
        """The layout of the arena of the end that plays ``role``; both ends compute both."""
        logits = shape.router_logits if role is Role.FFN else 0
        return cls(
            stages=shape.stages,
            peers=shape.lanes if role is Role.FFN else 1,
            hidden_bytes=_aligned(shape.max_tokens * shape.hidden_size * shape.itemsize),
            logits_bytes=_aligned(shape.max_tokens * logits * LOGIT_BYTES),
        )

    @property
    def size(self) -> int:
        return self._words + self.stages * self.peers * (self.hidden_bytes + self.logits_bytes)

    @property
    def _words(self) -> int:
        return _aligned(self.stages * self.peers * _WORD_STRIDE)

    def arrived(self, stage: int, peer: int) -> int:
        return (stage * self.peers + peer) * _WORD_STRIDE

    def hidden(self, stage: int, peer: int) -> int:
        return self._words + (stage * self.peers + peer) * (self.hidden_bytes + self.logits_bytes)

    def logits(self, stage: int, peer: int) -> int:
        return self.hidden(stage, peer) + self.hidden_bytes
