# SPDX-License-Identifier: Apache-2.0
"""Counters of one control plane, for metrics and for tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Numbers since the start of this control plane; plain integers, each written by one thread.

    Attributes:
        steps_sent: STEP messages sent (attention).
        steps_received: STEP messages received, over all lanes (FFN).
        steps_delivered: Merged steps handed to the caller (FFN).
        heartbeats_sent, heartbeats_received: Over all neighbours.
        dropped: Messages that were dropped, by reason: ``malformed``, ``foreign`` (no admitted member),
            ``stale-epoch``, ``unexpected`` (a member's message that means nothing now), ``redundant``,
            ``unsent`` (a connection took nothing).
        strangers: Connections whose handshake failed, most often for another token.
        refused: Members that knocked and were refused, by error name.
        last_seen_age_s: Seconds since each neighbour was last heard, at the last heartbeat tick, by name.
    """

    steps_sent: int = 0
    steps_received: int = 0
    steps_delivered: int = 0
    heartbeats_sent: int = 0
    heartbeats_received: int = 0
    strangers: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    last_seen_age_s: dict[str, float] = field(default_factory=dict)
