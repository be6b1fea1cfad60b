# SPDX-License-Identifier: Apache-2.0
"""What every part of a GPU go is given, and the engine arguments that native and AFD share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 240.0
RUN_S = 180.0

PARITY_ENGINE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "seed": 0,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_flashinfer_autotune": False,
}
EAGER: Mapping[str, Any] = {"enforce_eager": True}
GRAPH: Mapping[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0},
}
MODES: Mapping[str, Mapping[str, Any]] = {"eager": EAGER, "graph": GRAPH}


@dataclass
class Host:
    """Where the parts run: folder of the logs, the moment by which all must be over, settings from the
    command line.
    """

    logs: Path
    deadline: float
    settings: Mapping[str, Any]
    gpus: int = 1
    """GPUs of the cell, not of the machine."""

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def setting(self, name: str, default: Any) -> Any:
        return self.settings.get(name, default)
