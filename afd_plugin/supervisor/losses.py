# SPDX-License-Identifier: Apache-2.0
"""Engine processes that are gone while the child that they belonged to goes on as if it could still answer.

An engine's processes end with their child: at once, or when its clients have had their errors. vLLM's HTTP server that
has killed its engine at the end of a drain does neither; its clients would wait for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

ENGINE_PROCESSES = ("::EngineCore", "::Worker")
"""In the titles of vLLM's engine cores and workers, whatever `VLLM_PROCESS_NAME_PREFIX` puts before them."""


class Losses:
    """Looks at the processes of a service again and again.

    Args:
        patience: Seconds for a child to follow its engine.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._since: float | None = None

    @property
    def seen(self) -> bool:
        """Whether the last look found one gone."""
        return self._since is not None

    def overdue(self, serving: Mapping[int, str], alive: Collection[int], now: float) -> str:
        """The engine processes of ``serving`` (names by number) that have been gone for too long; empty if none."""
        lost = [
            name
            for pid, name in serving.items()
            if pid not in alive and any(mark in name for mark in ENGINE_PROCESSES)
        ]
        if not lost:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since > self._patience:
            return ", ".join(lost)
        return ""
