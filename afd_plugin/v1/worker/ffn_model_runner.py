# SPDX-License-Identifier: Apache-2.0
"""The FFN's model runner: it loads a model and lets go of it. Steps belong to ``ffn_service``."""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model

from afd_plugin.errors import UnsupportedFeature


class FFNModelRunner:
    """What a native worker needs of a runner in the FFN role; nothing request-facing.

    It is not a ``GPUModelRunner``: no input batch, no KV cache, no sampler, no graphs of its own.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.model: nn.Module | None = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Build and load by vLLM's own loader, which the worker has scoped to this role."""
        if load_dummy_weights:
            raise UnsupportedFeature("elastic expert parallelism loads dummy weights; AFD does not run it.")
        self.model = get_model(vllm_config=self.vllm_config)

    def get_model(self) -> nn.Module:
        """The role's half of the model."""
        if self.model is None:
            raise RuntimeError("the FFN model is not loaded yet")
        return self.model

    def shutdown(self) -> None:
        """Release the model."""
        self.model = None
        self.vllm_config.compilation_config.static_forward_context.clear()


class GPUFFNModelRunner(FFNModelRunner):
    """The CUDA lane's FFN runner, under the class path the RFC fixes."""
