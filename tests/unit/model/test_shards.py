# SPDX-License-Identifier: Apache-2.0
"""Which part of a layer's experts a shard is told to hold: every expert once, whichever way they are split."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)

from afd_plugin.errors import UnsupportedFeature
from afd_plugin.model.shards import Shard, become_part

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ALONE = FusedMoEParallelConfig(
    tp_size=1, pcp_size=1, dp_size=1, ep_size=1, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, sp_size=1,
    use_ep=False, all2all_backend="allgather_reducescatter", enable_eplb=False,
)  # fmt: skip


def layer(experts: int = 7) -> FusedMoEConfig:
    return FusedMoEConfig(
        num_experts=experts, experts_per_token=2, hidden_dim=64, intermediate_size=96, num_local_experts=experts,
        num_logical_experts=experts, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Default, moe_parallel_config=ALONE, in_dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("count", [2, 3])
def test_whole_experts_are_dealt_so_that_each_lives_on_one_shard(count: int) -> None:
    held: list[int] = []
    for index in range(count):
        config = layer()
        experts = become_part(config, Shard(index, count, whole=True))
        assert experts.expert_map is not None
        own = [expert for expert, local in enumerate(experts.expert_map.tolist()) if local >= 0]
        assert config.num_local_experts == len(own)
        assert config.intermediate_size_per_partition == 96
        assert not config.moe_parallel_config.use_all2all_kernels
        held += own
    assert sorted(held) == list(range(7))


def test_a_slice_of_every_expert_is_a_part_of_its_width() -> None:
    for index in range(3):
        config = layer()
        experts = become_part(config, Shard(index, 3, whole=False))
        assert experts.expert_map is None
        assert config.num_local_experts == 7
        assert config.intermediate_size_per_partition == config.intermediate_size_per_partition_unpadded == 32
        assert (config.moe_parallel_config.tp_size, config.moe_parallel_config.tp_rank) == (3, index)


@pytest.mark.parametrize("size", ["tp_size", "ep_size", "dp_size"])
def test_a_process_that_is_not_alone_in_its_world_is_no_shard(size: str) -> None:
    with pytest.raises(UnsupportedFeature, match="one rank"):
        Shard(0, 2, whole=True).rank(dataclasses.replace(ALONE, **{size: 2}))
