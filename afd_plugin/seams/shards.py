# SPDX-License-Identifier: Apache-2.0
"""How an FFN shard's layers are told which part of the experts they hold."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="routed-experts-init",
        symbol="vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.__init__",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def __init__(self, layer_name: str, params_dtype: torch.dtype, moe_config: FusedMoEConfig, "
            "quant_config: QuantizationConfig | None, expert_map_manager: ExpertMapManager, "
            "ckpt_gate_proj_name: str='gate_proj', ckpt_down_proj_name: str='down_proj', "
            "ckpt_up_proj_name: str='up_proj', is_fused_checkpoint_transposed: bool=False, "
            "renormalize: bool=True, use_grouped_topk: bool=False, num_expert_group: int | None=None, "
            "topk_group: int | None=None, custom_routing_function: Callable | None=None, "
            "scoring_func: str='softmax', routed_scaling_factor: float=1.0, "
            "swiglu_limit: float | None=None, swiglu_alpha: float | None=None, "
            "swiglu_beta: float | None=None, e_score_correction_bias: torch.Tensor | None=None, "
            "apply_router_weight_on_input: bool=False)"
        ),
        sha256="9d46080b72231443bc10adfb6c1f33cad7704642fc2bc21b12e0f66b482ce9e4",
        invariant=(
            "The factory passes the first four by position and the expert map by name, hands the same "
            "configuration object to the runner afterwards, and every size of the layer is read from these two."
        ),
        plan="propose upstream: a parallel configuration of the layer that its caller may give",
        used_by=("afd_plugin.model.shards",),
        afd_tests=evidence.SHARDS,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="moe-parallel-config",
        owner="vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig",
        names={
            "dp_size": "edc55d512bff522a",
            "ep_size": "7c96a34acc6687c9",
            "tp_size": "d1186565cfd4e553",
        },
        invariant="Sizes of the layer's parallel groups; with DP 1 no all-to-all is made, whatever EP is.",
        afd_tests=evidence.SHARDS,
    ),
    Surface(
        id="moe-config-of-a-shard",
        owner="vllm.model_executor.layers.fused_moe.config:FusedMoEConfig",
        names={
            "experts_per_token": "42845eecd672d9f2",
            "in_dtype": "4c7d468d302a5950",
            "max_num_tokens": "9eb1cd6fcdf19687",
            "moe_parallel_config": "fe74eb8994523123",
            "num_experts": "75768d3aff3c86e8",
        },
        invariant="A mutable dataclass whose sizes per rank follow from the parallel configuration when it is made.",
        afd_tests=evidence.SHARDS,
    ),
    Surface(
        id="expert-map-class",
        owner="vllm.model_executor.layers.fused_moe.expert_map_manager:",
        names={
            "ExpertMapManager": "6b77a473d2e5cb1c",
        },
        invariant="Says which experts a rank holds, and under which local number.",
        afd_tests=evidence.SHARDS,
    ),
    Surface(
        id="expert-map",
        owner="vllm.model_executor.layers.fused_moe.expert_map_manager:ExpertMapManager",
        names={
            "local_num_experts": "4a15600eaeab898e",
        },
        invariant="How many experts a rank holds.",
        afd_tests=evidence.SHARDS,
    ),
)
