# SPDX-License-Identifier: Apache-2.0
"""Layers: out-of-tree replacement, routed experts, how other layers are recognised."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="oot-registry",
        symbol="vllm.model_executor.custom_op:op_registry_oot",
        kind=SeamKind.REGISTRY_SCOPE,
        signature="op_registry_oot: dict[str, type['CustomOp'] | type['PluggableLayer']]",
        sha256="69f370b553215c36e2389054fd60e7282141c307064f2119f941ba2c1f4c65e9",
        invariant=(
            "An out-of-tree replacement is looked up by the class name at each construction and "
            "nowhere else, so removing it restores native construction."
        ),
        plan="propose upstream: `register_oot` as a context manager",
        used_by=("afd_plugin.model.build",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="routed-experts",
        symbol="vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts",
        kind=SeamKind.SUBCLASS,
        signature="@PluggableLayer.register('routed_experts') class RoutedExperts(PluggableLayer)",
        sha256="4eddbb52498f17ebc503f1c0e33df1cd186076ed1a3d4cadbf9b071bda7e917a",
        invariant=(
            "The factory builds it through the out-of-tree registry, and it creates no parameter but "
            "through its quantisation method."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=(
            "afd_plugin.model.build",
            "afd_plugin.model.remote_runner",
            "afd_plugin.model.scan",
            "afd_plugin.model.shards",
        ),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="routed-experts-quant-method",
        symbol="vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts._get_quant_method",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def _get_quant_method(self, prefix: str, quant_config: QuantizationConfig | None, "
            "moe_config: FusedMoEConfig) -> FusedMoEMethodBase"
        ),
        sha256="6b4dbcc31b7d4edce473a86fff4ec5e9d6060abd4d8aa4cbf425903d30d1b82b",
        invariant="The constructor takes the quantisation method from here, before it creates weights.",
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-method",
        symbol="vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase",
        kind=SeamKind.SUBCLASS,
        signature="class FusedMoEMethodBase(QuantizeMethodBase)",
        sha256="93f34d0ab8608a8f96985b9d60c0b5cd7b5a4739feb17378413cd4ce0d998856",
        invariant=(
            "A method without a kernel and without weights is complete with the methods overridden here."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-method-create-weights",
        symbol=(
            "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.create_weights"
        ),
        kind=SeamKind.OVERRIDE,
        signature=(
            "@abstractmethod def create_weights(self, layer: 'RoutedExperts', num_experts: int, "
            "hidden_size: int, intermediate_size_per_partition: int, params_dtype: torch.dtype, "
            "**extra_weight_attrs)"
        ),
        sha256="37b91896e9a082b6a7db0fa21ae79bcf87e9d415c2b5169ae17f7c860057d6d1",
        invariant="The only place where parameters of routed experts come into being.",
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-method-quant-config",
        symbol=(
            ""
            "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.get_fused_moe_quant_config"
        ),
        kind=SeamKind.OVERRIDE,
        signature=(
            "@abstractmethod def get_fused_moe_quant_config(self, layer: 'RoutedExperts') -> "
            "FusedMoEQuantConfig | None"
        ),
        sha256="38baf13bfaa8cbcd452f2c4494fff04d0d4dc778a261d9f74c4ed115bb3ad909",
        invariant="Kernel warm-up calls it for every runner and accepts None.",
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-method-roundup",
        symbol=(
            ""
            "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.maybe_roundup_sizes"
        ),
        kind=SeamKind.OVERRIDE,
        signature=(
            "def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, "
            "act_dtype: torch.dtype, moe_parallel_config: FusedMoEParallelConfig) -> tuple[int, int]"
        ),
        sha256="8cac3a73c7b6768ce15ca5dfadba27e1ef97af84240af53b35bbbdf36e227e8e",
        invariant=(
            "The sizes it returns are the ones hidden states have; returned unchanged, nothing is padded."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-method-process-weights",
        symbol=(
            ""
            "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading"
        ),
        kind=SeamKind.OVERRIDE,
        signature="def process_weights_after_loading(self, layer: nn.Module) -> None",
        sha256="12a77395d6d5512c58b690482b2dae7890da210a5bef04686287411e29ec37a7",
        invariant="Called once for each module with a quantisation method, after loading.",
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="torch-module-tables",
        owner="torch.nn.modules.module:Module",
        names={
            "_modules": "de2bbd554dd1da8e",
            "_parameters": "86f1c0247baf6c1d",
        },
        invariant=(
            "The tables of registered children and parameters, read to walk a module's own entries; "
            "`named_*` would recurse."
        ),
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="pluggable-layer-class",
        owner="vllm.model_executor.custom_op:",
        names={
            "PluggableLayer": "9ba6074e669cd7b1",
        },
        invariant="The base of layers that can be replaced out of tree.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="pluggable-layer",
        owner="vllm.model_executor.custom_op:PluggableLayer",
        names={
            "register_oot": "e9f21f47469d0576",
        },
        invariant="Registers a replacement under the class's own name and refuses a second one.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="attention-layer",
        owner="vllm.model_executor.layers.attention_layer_base:",
        names={
            "AttentionLayerBase": "eabbc9b5e455c131",
        },
        invariant="The base of every layer that has a KV cache: how attention modules are recognised.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="moe-config-classes",
        owner="vllm.model_executor.layers.fused_moe.config:",
        names={
            "FusedMoEConfig": "ebef1bc009677def",
            "FusedMoEParallelConfig": "b75ca18730e14ede",
            "FusedMoEQuantConfig": "9d6b76e983544d95",
        },
        invariant="Classes in signatures of overridden methods.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="moe-config",
        owner="vllm.model_executor.layers.fused_moe.config:FusedMoEConfig",
        names={
            "num_logical_experts": "e0d3b29cc4efab3b",
        },
        invariant="The number of router logits per token.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="routed-experts-attributes",
        owner="vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts",
        names={
            "quant_method": "27713cfa3d8fa58d",
        },
        invariant="The quantisation method the constructor chose.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="hash-router-class",
        owner="vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:",
        names={
            "FusedTopKBiasRouter": "e6d5fd045edb9afb",
        },
        invariant="The only router that can select experts by token id.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="hash-router",
        owner="vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:FusedTopKBiasRouter",
        names={
            "_hash_indices_table": "dc66ad745a54aff4",
        },
        invariant="Set for layers that need token ids, which AFD refuses.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="linear",
        owner="vllm.model_executor.layers.linear:",
        names={
            "LinearBase": "fa66b969fdfd04b2",
        },
        invariant="The base of every linear layer: how dense MLPs are recognised.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="quantization-config-class",
        owner="vllm.model_executor.layers.quantization.base_config:",
        names={
            "QuantizationConfig": "fc0a67f94f654af6",
        },
        invariant="A class in the signature of an overridden method.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="vocab-embedding",
        owner="vllm.model_executor.layers.vocab_parallel_embedding:",
        names={
            "VocabParallelEmbedding": "6af52d7dbe908a04",
        },
        invariant="The base of embedding and head: how both are recognised.",
        afd_tests=evidence.MODEL,
    ),
)
