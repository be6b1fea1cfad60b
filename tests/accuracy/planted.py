# SPDX-License-Identifier: Apache-2.0
"""FFNs that are wrong in one known way, for the accuracy gate to catch.

Some faults are other weights in the FFN's checkpoint; the others are a service that computes or answers wrongly:
`python -m tests.accuracy.planted AFD_JSON MODEL ...` is `ffn_main` with the fault that `AFD_ACCURACY_FAULT` names.
No product code is touched.
"""

import enum
import os
import re
import shutil
import sys
from pathlib import Path

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from afd_plugin.cli import child, ffn_main
from afd_plugin.config import Role
from afd_plugin.plan import RemoteUnit
from afd_plugin.v1.worker.cpu_ffn_worker import CPUAFDFFNWorker
from afd_plugin.v1.worker.ffn_service import FFNService
from qualify.accuracy.architectures import Architecture

VARIABLE = "AFD_ACCURACY_FAULT"
SHARED_SCALE = 0.4
DROPPED_ONE_IN = 101
"""Odd, so that every layer is hit in turn."""
ZEROED_EXPERT = 3


class Fault(enum.Enum):
    """What is wrong with the FFN."""

    NONE = "none"
    SHARED_SCALED = "shared-x0.4"
    EXPERT_ZEROED = "expert-zeroed"
    ROUTER_BIAS_IGNORED = "router-bias-ignored"
    SCALED_TWICE = "scaled-twice"
    TOP_ONE = "top-1"
    LAST_LAYER_LATE = "last-layer-late"
    ROWS_DROPPED = "rows-dropped"

    @property
    def in_the_weights(self) -> bool:
        """Whether the fault is another checkpoint, not another service."""
        return self in (
            Fault.SHARED_SCALED,
            Fault.EXPERT_ZEROED,
            Fault.ROUTER_BIAS_IGNORED,
            Fault.SCALED_TWICE,
        )

    @property
    def in_answers(self) -> bool:
        """Whether some 80 answers show it. Those that they do not are the numeric probe's, which shows every fault: a
        lost row of one layer seldom changes a greedy answer.
        """
        return self is not Fault.ROWS_DROPPED

    def possible(self, architecture: Architecture) -> bool:
        """Whether the model has the part that the fault is in."""
        if self is Fault.SHARED_SCALED:
            return bool(architecture.config.get("n_shared_experts", 0))
        if self in (Fault.ROUTER_BIAS_IGNORED, Fault.SCALED_TWICE):
            return architecture.mla
        return True


def _edited(fault: Fault, name: str, tensor: torch.Tensor, scale: float) -> torch.Tensor:
    if fault is Fault.SHARED_SCALED and name.endswith("shared_experts.down_proj.weight"):
        return tensor * SHARED_SCALE
    if fault is Fault.EXPERT_ZEROED and name.endswith(f".experts.{ZEROED_EXPERT}.down_proj.weight"):
        return torch.zeros_like(tensor)
    if fault is Fault.ROUTER_BIAS_IGNORED and name.endswith("e_score_correction_bias"):
        return torch.zeros_like(tensor)
    if fault is Fault.SCALED_TWICE and re.search(r"\.experts\.\d+\.down_proj\.weight$", name):
        return tensor * scale
    return tensor


def checkpoint(fault: Fault, architecture: Architecture, model: Path, folder: Path) -> Path:
    """A copy of the checkpoint with `fault` in its weights; the checkpoint itself where the fault is elsewhere."""
    from safetensors.torch import load_file, save_file

    if not fault.in_the_weights:
        return model
    folder.mkdir(parents=True)
    scale = architecture.config.get("routed_scaling_factor", 1.0)
    changed = 0
    for path in sorted(model.iterdir()):
        if path.suffix != ".safetensors":
            shutil.copy2(path, folder / path.name)
            continue
        before = load_file(path)
        after = {name: _edited(fault, name, tensor, scale) for name, tensor in before.items()}
        changed += sum(not torch.equal(after[name], tensor) for name, tensor in before.items())
        save_file(after, folder / path.name, metadata={"format": "pt"})
    if not changed:
        raise ValueError(f"{fault.value} changes nothing in {model.name}")
    return folder


class PlantedService(FFNService):
    """Computes as the product does, but for its fault."""

    _exchanges = 0
    _late: torch.Tensor | None = None

    def _compute(self, unit: RemoteUnit, hidden: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        fault = Fault(os.environ[VARIABLE])
        module = self._modules[unit.index]
        if fault is Fault.TOP_ONE and isinstance(module, MoERunner):
            module.moe_config.experts_per_token = 1
        output = super()._compute(unit, hidden, logits)
        self._exchanges += 1
        if fault is Fault.LAST_LAYER_LATE and unit.index == max(self._modules):
            before = self._late if self._late is not None else torch.zeros_like(output[:1])
            self._late = output[-1:].clone()
            return torch.cat((before, output[:-1]))
        if fault is Fault.ROWS_DROPPED and self._exchanges % DROPPED_ONE_IN == 0:
            output[-1] = 0
        return output


class PlantedFFNWorker(CPUAFDFFNWorker):
    """The CPU lane's FFN worker with that service."""

    service_class = PlantedService


def main() -> int:
    """Run the FFN child with the planted class in the place of its own."""
    child.WORKER_CLASSES = {
        **child.WORKER_CLASSES,
        (Role.FFN, current_platform.device_type): "tests.accuracy.planted.PlantedFFNWorker",
    }
    return child.run_child(ffn_main.serve, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
