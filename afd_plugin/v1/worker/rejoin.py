# SPDX-License-Identifier: Apache-2.0
"""How an attention lane's leader meets its peers: the first time, and again after the FFN has been started anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import AFDConnector
from afd_plugin.control import AttentionControl, Fingerprint, Membership
from afd_plugin.errors import RendezvousTimeout
from afd_plugin.topology import Topology
from afd_plugin.v1.worker.recovery import Planes

LOOK_S = 0.5


@dataclass(frozen=True)
class Rejoining:
    """A :data:`~afd_plugin.v1.worker.recovery.Rejoin`: who the lane is, and what makes its connector.

    The fingerprint is that of the first life, so an FFN that was started with something else is refused.
    """

    settings: LinkSettings
    topology: Topology
    lane: int
    fingerprint: Fingerprint
    make_connector: Callable[[LinkSettings], AFDConnector]

    def __call__(
        self, data: Mapping[str, str], seconds: float, cancelled: threading.Event, before: Planes
    ) -> Planes:
        """New planes within ``seconds``, or an error and nothing left open. Counters go on from ``before``."""
        deadline = time.monotonic() + seconds
        control = AttentionControl()
        control.statistics = before.control.statistics
        connector: AFDConnector | None = None
        try:
            settings = replace(self.settings, rendezvous_timeout_s=seconds)
            control.connect(settings, self.topology, self.lane, self.fingerprint, data, cancelled)
            connector = self.make_connector(
                replace(settings, rendezvous_timeout_s=max(1.0, deadline - time.monotonic()))
            )
            connector.counts = before.connector.counts
            control.ready()
            membership = _wait_ready(control, deadline, cancelled)
            connector.connect(membership.group(self.topology.group_of(self.lane)).data)
        except BaseException:
            if connector is not None:
                connector.close()
            control.close()
            raise
        return Planes(control, connector, membership)


def _wait_ready(control: AttentionControl, deadline: float, cancelled: threading.Event) -> Membership:
    while True:
        left = deadline - time.monotonic()
        try:
            return control.wait_ready(min(LOOK_S, max(left, 0.0)))
        except RendezvousTimeout:
            if left <= 0 or cancelled.is_set():
                raise
