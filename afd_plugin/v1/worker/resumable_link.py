# SPDX-License-Identifier: Apache-2.0
"""An attention link that outlives its FFN: the leader's, where ``--ffn-restart-window`` is given."""

from __future__ import annotations

from typing import Any

import torch

from afd_plugin.config import AFDConfig
from afd_plugin.connectors.base import AFDConnector
from afd_plugin.errors import ConfigRefused, PeerFailure
from afd_plugin.plan import Exchange, RemoteUnit, StepPlan
from afd_plugin.v1.worker.attention_link import AttentionLink
from afd_plugin.v1.worker.recovery import Planes, Recovery
from afd_plugin.v1.worker.resume import Sent


class ResumableLink(AttentionLink):
    """Announcements and exchanges that are made again, or go on, when the FFN has been started again."""

    def __init__(self, recovery: Recovery, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recovery = recovery

    def end(self, plan: StepPlan, error: BaseException | None) -> None:
        super().end(plan, error)
        if error is None:
            self._recovery.progress.finish()

    def check(self) -> None:
        self._recovery.check()

    def _announce(self, plan: StepPlan) -> None:
        begun = False
        while not begun:
            planes: Planes | None = None
            try:
                with self._recovery.use() as planes:
                    planes.control.check()
                    self._recovery.progress.begin(plan)
                    begun = True
                    planes.control.announce(plan)
            except PeerFailure as error:
                if planes is None:
                    raise
                # A step that had begun is announced again by the recovery.
                self._recovery.lost(planes, error)

    def _cause(self, error: Exception) -> BaseException:
        return self._recovery.verdict(error)

    def _cross(
        self, exchange: Exchange, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> torch.Tensor:
        while True:
            planes: Planes | None = None
            try:
                with self._recovery.use() as planes:
                    output = self._through(planes.connector, exchange, unit, hidden, router_logits)
                    self._recovery.progress.complete(self._kept(exchange, unit, hidden, router_logits))
                return output
            except PeerFailure as error:
                if planes is None:
                    raise
                self._recovery.lost(planes, error)

    def _kept(
        self, exchange: Exchange, unit: RemoteUnit, hidden: torch.Tensor, router_logits: torch.Tensor | None
    ) -> Sent | None:
        """A copy of what was sent, where another lane may still wait for its answer to the same exchange."""
        if self.lanes == 1:
            return None
        logits = None if router_logits is None else router_logits.clone()
        return Sent(exchange, unit, hidden.clone(), logits)


def check_resumable(config: AFDConfig, connector: AFDConnector) -> None:
    """Refuse to hold requests where an interrupted step could not go on."""
    topology = config.topology
    if not topology.one_ffn:
        raise ConfigRefused(
            f"AFD_FFN_RESTART_WINDOW (--ffn-restart-window) is set, but only one FFN group with lanes in lockstep can "
            f"be started again, and {topology.name} has more, or engines of their own; drop the option."
        )
    if connector.stream_ordered or config.microbatches > 1:
        raise ConfigRefused(
            f"AFD_FFN_RESTART_WINDOW (--ffn-restart-window) is set, but a step over {config.connector} in "
            f"{config.microbatches} stage(s) cannot go on after the FFN was lost; drop the option."
        )
