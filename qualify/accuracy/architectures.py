# SPDX-License-Identifier: Apache-2.0
"""The two models that are trained: their `config.json`, pure data.

Small where it does not matter (hidden size, layers, vocabulary), real where the split or a kernel looks:
DeepSeek's MLA head sizes, V3's sigmoid scores with correction bias and groups, a routed scale that is not 1,
a shared expert, a first dense layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from afd_plugin.demo.recipes import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY_SIZE,
}

_DEEPSEEK_ROPE = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
"""YaRN by a factor of one, which is the plain rotary embedding: vLLM's CPU kernel for the plain one is wrong for
DeepSeek's heads (docs/accuracy.md), its YaRN is not."""


@dataclass(frozen=True)
class Architecture:
    """One trained model: the name of its folder and its `config.json`."""

    name: str
    config: Mapping[str, Any]

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""
        config = self.config
        count: int = config["n_routed_experts"] if "n_routed_experts" in config else config["num_experts"]
        return count

    @property
    def mla(self) -> bool:
        """Whether attention is DeepSeek's."""
        return "kv_lora_rank" in self.config

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold experts: all but the first."""
        return tuple(range(1, int(self.config["num_hidden_layers"])))


DEEPSEEK_V3 = Architecture(
    "trained-deepseek-v3",
    {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": _DEEPSEEK_ROPE,
        "routed_scaling_factor": 1.8,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
)

QWEN3_MOE = Architecture(
    "trained-qwen3-moe",
    {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 64,
        "max_window_layers": 4,
        "mlp_only_layers": [0],
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {item.name: item for item in (DEEPSEEK_V3, QWEN3_MOE)}
