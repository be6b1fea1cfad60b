# SPDX-License-Identifier: Apache-2.0
"""Test-only worker classes that write down what each decoder layer and each MoE block gave, natively and under AFD.

Every output is appended, as float32, to `AFD_ACCURACY_PROBE/NAME.bin`, a row a token, in the order of the steps. Two
runs of one batch plan write the same rows in the same order.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from afd_plugin.v1.worker.cpu_attention_worker import CPUAFDAttentionWorker

FOLDER = "AFD_ACCURACY_PROBE"


def observe(model: torch.nn.Module) -> None:
    """Hook every decoder layer (`layer-N`: its output and the residual, added) and every MLP (`mlp-N`)."""
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(_writer(f"layer-{index}"))
        layer.mlp.register_forward_hook(_writer(f"mlp-{index}"))


def _writer(name: str) -> Any:
    target = Path(os.environ[FOLDER]) / f"{name}.bin"

    def write(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        total = sum(part.float() for part in parts)
        with target.open("ab") as file:
            file.write(total.numpy().astype(np.float32).tobytes())

    return write


class NativeProbe(CPUWorker):
    """vLLM's own CPU worker, observed from the first request on."""

    def compile_or_warm_up_model(self) -> Any:
        answer = super().compile_or_warm_up_model()
        observe(self.model_runner.get_model())
        return answer


class AttentionProbe(CPUAFDAttentionWorker):
    """AFD's CPU attention worker, observed likewise."""

    def compile_or_warm_up_model(self) -> Any:
        answer = super().compile_or_warm_up_model()
        observe(self.model_runner.get_model())
        return answer
