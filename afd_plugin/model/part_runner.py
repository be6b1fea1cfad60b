# SPDX-License-Identifier: Apache-2.0
"""The MoE runner of an FFN process that leaves shared experts to somebody else: attention, or the first shard."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from afd_plugin.errors import UnsupportedFeature


class PartMoERunner(MoERunner):
    """Native, with or without the shared experts that the factory hands over."""

    with_shared: ClassVar[bool]
    """Set by the build scope before the model is constructed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config: FusedMoEConfig = kwargs["moe_config"]
        if config.in_dtype == torch.float16:
            raise UnsupportedFeature(
                "float16 scales shared experts in the place of routed ones, which no longer fits once they are in "
                "different processes; use bfloat16 with --ffn-shards or --shared attention."
            )
        if not self.with_shared:
            kwargs |= {"shared_experts": None, "shared_expert_gate": None}
        super().__init__(*args, **kwargs)
