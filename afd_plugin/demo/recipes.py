# SPDX-License-Identifier: Apache-2.0
"""What the three test checkpoints are: pure data, no torch.

A recipe is a model's `config.json`, a seed and the gains of its weights. Its digest names the checkpoint in
the cache, so changing any value makes a new checkpoint and never reuses an old one.

The shapes are small; what matters for the split is real: DeepSeek's MLA head sizes (nope 128, rope 64,
value 128, KV rank 512), which MLA kernels need, a first dense layer, shared experts, a routed scale that
is not 1, V3's sigmoid scores with correction bias and expert groups, and Qwen3's plain experts. Hidden and
intermediate sizes stay multiples of 32 when halved by TP 2, which the CPU and GPU expert kernels need.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

FORMAT_VERSION = 1
"""Raise it when the maker changes what it writes for an unchanged recipe."""

VOCABULARY_SIZE = 256
BOS_TOKEN, BOS_ID = "<bos>", 0
EOS_TOKEN, EOS_ID = "<eos>", 1
PAD_TOKEN, PAD_ID = "<pad>", 2
UNKNOWN_TOKEN, UNKNOWN_ID = "<unk>", 3

ARCHITECTURES_WITHOUT_MLA_ON_CPU = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"})
"""Use MLA on a GPU, and plain multi-head attention on the CPU, where `VLLM_MLA_DISABLE=1` is needed."""


@dataclass(frozen=True)
class Gains:
    """Scale of each kind of weight, as the factor on 1/sqrt(fan-in) (embedding: the standard deviation).

    They are chosen so that greedy generations wander over the vocabulary and every part of an MoE layer
    moves the logits by far more than a rounding step.
    """

    embedding: float = 1.0
    attention_qk: float = 1.6
    attention_v: float = 1.5
    attention_output: float = 2.0
    feed_forward_up: float = 1.2
    feed_forward_down: float = 1.5
    router: float = 2.0
    head: float = 3.0
    norm_spread: float = 0.1
    router_bias_spread: float = 0.3


@dataclass(frozen=True)
class Recipe:
    """One checkpoint: its name, `config.json`, seed and gains."""

    name: str
    config: Mapping[str, Any]
    seed: int = 20260728
    gains: Gains = field(default_factory=Gains)
    shards: int = 3
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of everything above; names the cache folder."""
        text = json.dumps(asdict(replace(self, config=dict(self.config))), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def architecture(self) -> str:
        """The model class vLLM builds."""
        architecture: str = self.config["architectures"][0]
        return architecture

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold experts, each one exchange per step."""
        first = int(self.config.get("first_k_dense_replace", 0))
        return tuple(range(first, int(self.config["num_hidden_layers"])))

    @property
    def cpu_note(self) -> str:
        """What a record made on the CPU cell must say about this model's attention; empty if nothing."""
        if self.architecture in ARCHITECTURES_WITHOUT_MLA_ON_CPU:
            return "MHA path: MLA is disabled on the CPU cell (VLLM_MLA_DISABLE=1), so nothing here tests MLA"
        return ""


_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY_SIZE,
}

_DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000,
}

DEEPSEEK_V2 = Recipe(
    name="deepseek-v2",
    config={
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "aux_loss_alpha": 0.001,
        "n_group": 1,
        "n_routed_experts": 8,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 1024,
            "type": "yarn",
        },
        "routed_scaling_factor": 1.6,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
    },
)

DEEPSEEK_V3 = Recipe(
    name="deepseek-v3",
    config={
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "ep_size": 1,
        "n_group": 4,
        "n_routed_experts": 16,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 192,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
            "type": "yarn",
        },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
    },
)

QWEN3_MOE = Recipe(
    name="qwen3-moe",
    config={
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "intermediate_size": 512,
        "max_window_layers": 4,
        "mlp_only_layers": [],
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    },
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in (DEEPSEEK_V2, DEEPSEEK_V3, QWEN3_MOE)}
"""The checkpoints by name, in the order in which the demo serves them."""
