# SPDX-License-Identifier: Apache-2.0
"""Extensions of vLLM, by its own options, that raise once a file exists: attention fails outside a forward pass."""

import os
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

WHEN = "AFD_E2E_FAIL_WHEN"


def raise_if_due(where: str) -> None:
    """Raise once the file exists."""
    if Path(os.environ[WHEN]).exists():
        raise FloatingPointError(f"planted in {where}")


class RaisingProcessor(LogitsProcessor):
    """`--logits-processors`: raises in the attention worker, between two steps."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        raise_if_due("sampling")
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass


class RaisingScheduler(Scheduler):
    """`--scheduler-cls`: raises in the engine core, of which no worker hears."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        raise_if_due("scheduling")
        return super().schedule(*args, **kwargs)
