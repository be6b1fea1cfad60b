# SPDX-License-Identifier: Apache-2.0
"""What one FFN shard holds: a part of every layer's experts, without any vLLM world between the shards.

vLLM's layers already compute a part: as one rank of expert parallelism (whole experts) or of tensor parallelism (a
slice of each). A shard's layer is told such a rank, and since its process is alone in its world, the all-reduce that
would follow finds nobody to ask: what leaves the layer is the shard's part of the sum. The gate is whole on every
shard and computes the same from the same rows; shared experts belong to the first shard alone (``part_runner``).

On a GPU experts are split whole. vLLM 0.28.0's CPU kernel takes no expert map, so there each expert is sliced.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from afd_plugin.errors import UnsupportedFeature


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which part of the experts a process holds. ``whole`` experts, or a slice of each."""

    index: int
    count: int
    whole: bool

    def rank(self, alone: FusedMoEParallelConfig) -> FusedMoEParallelConfig:
        """The layer's place among the shards, where its process is ``alone``; raises for one that is not."""
        if alone.tp_size != 1 or alone.ep_size != 1 or alone.dp_size != 1:
            raise UnsupportedFeature(
                "An FFN shard is one rank; its layers are split by vLLM's own world already."
            )
        if self.whole:
            return dataclasses.replace(alone, ep_size=self.count, ep_rank=self.index, use_ep=True)
        return dataclasses.replace(alone, tp_size=self.count, tp_rank=self.index)


def become_part(config: FusedMoEConfig, shard: Shard) -> ExpertMapManager:
    """Make a layer's configuration that of its shard, in place, since its runner is given the same object later.

    Returns the map of the shard's experts.
    """
    parallel = shard.rank(config.moe_parallel_config)
    experts = ExpertMapManager(
        max_num_batched_tokens=config.max_num_tokens,
        top_k=config.experts_per_token,
        global_num_experts=config.num_experts,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    part = dataclasses.replace(
        config,
        moe_parallel_config=parallel,
        num_local_experts=experts.local_num_experts,
        intermediate_size_per_partition_unpadded=None,
    )
    vars(config).update(vars(part))
    return experts


class ShardRoutedExperts(RoutedExperts):
    """A part of the experts; everything else is native."""

    shard: ClassVar[Shard]
    """Set by the build scope before the model is constructed."""

    def __init__(
        self,
        layer_name: str,
        params_dtype: torch.dtype,
        moe_config: FusedMoEConfig,
        quant_config: QuantizationConfig | None,
        expert_map_manager: ExpertMapManager,
        **options: Any,
    ) -> None:
        experts = become_part(moe_config, self.shard)
        super().__init__(
            layer_name, params_dtype, moe_config, quant_config, expert_map_manager=experts, **options
        )
