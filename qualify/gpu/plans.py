# SPDX-License-Identifier: Apache-2.0
"""What one command on a leased GPU host does, stage after stage: `python -m qualify.gpu --plan NAME --out FOLDER`.

Parts of one stage run side by side; what measures time or memory has a stage of its own. A stage that would not fit
into what is left of the budget is written down as not run, never as passed. `seconds` are expectations: from the runs
in `evidence/h200x1` where there was one, else by their likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stage:
    """Parts that run side by side, how long they should take, and their settings."""

    parts: tuple[str, ...]
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One command."""

    cell: str
    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float:
        """What all stages should take."""
        return sum(stage.seconds for stage in self.stages)


_TWO_GPUS_TPOT = Stage(("bench",), 190, {"batches": [1, 32, 256], "repeats": 5})

PLANS: Mapping[str, Plan] = {
    # what is right, most doubtful first: microbatches, engines and shards apart, losses, clients, the service
    "one-gpu-right": Plan(
        "h200x1",
        (
            Stage(("control", "contract"), 70),
            Stage(("parity", "faults"), 250, {"cases": "doubtful", "workers": 5}),
            Stage(("clients",), 90),
            Stage(("serving",), 90),
        ),
    ),
    "one-gpu-long": Plan("h200x1", (Stage(("endurance",), 150), Stage(("parity",), 380, {"workers": 8}))),
    # what it costs, and where each microsecond goes
    "one-gpu-speed": Plan(
        "h200x1",
        (
            Stage(("exchange",), 30),
            Stage(("timeline",), 150, {"switches": ["shared-on-attention"]}),
            Stage(("bench",), 290),
        ),
    ),
    # the lever of one-gpu-speed's timeline in TPOT, and another in the timeline
    "one-gpu-lever": Plan(
        "h200x1",
        (
            Stage(("timeline",), 150, {"switches": ["shared-in-line"]}),
            Stage(("bench",), 290, {"switches": ["shared-on-attention"]}),
        ),
    ),
    # against native in vLLM's default compile and graph mode, whose compilation takes its time
    "one-gpu-default": Plan("h200x1", (Stage(("bench",), 420, {"native_default_mode": True, "repeats": 5}),)),
    # the long stretch without a request, alone in its command
    "one-gpu-idle": Plan("h200x1", (Stage(("serving",), 720, {"idle_s": 610}),)),
    # two GPUs, what is right: the rest of the time of a lease is for what then turns out wrong
    "two-gpus-right": Plan(
        "h200x2",
        (Stage(("links", "contract", "parity", "faults"), 320, {"cases": "nvlink", "workers": 14}),),
    ),
    # what the first lease of two GPUs left: NCCL's contract and cases with steps counted on the device, then TPOT
    "two-gpus-rest": Plan(
        "h200x2",
        (
            # the contract alone, because one of its cases compares the driver's free memory
            Stage(("contract",), 60, {"pytest": ["-k", "Nccl"]}),
            Stage(("parity",), 110, {"cases": "nccl", "workers": 12}),
            _TWO_GPUS_TPOT,
        ),
    ),
    "two-gpus-speed": Plan(
        "h200x2",
        (
            Stage(("exchange",), 50),
            _TWO_GPUS_TPOT,
        ),
    ),
}
