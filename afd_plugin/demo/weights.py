# SPDX-License-Identifier: Apache-2.0
"""The tensors of a test checkpoint, by their Hugging Face names, drawn from a seed.

Every tensor has its own generator, seeded by the recipe's seed and the tensor's name, so its values depend
neither on the order of drawing nor on the other tensors. NumPy draws them: its bit stream is the same on
every machine, which torch does not promise.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from afd_plugin.demo.recipes import Recipe


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to draw: normal with `mean` and standard deviation `std`; bf16 unless `keep_float32`."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    keep_float32: bool = False


def draw(spec: TensorSpec, seed: int) -> torch.Tensor:
    """The tensor of `spec`; the same bits for the same name, shape and seed."""
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
    values = generator.standard_normal(spec.shape, dtype=np.float32) * np.float32(spec.std)
    tensor = torch.from_numpy(values + np.float32(spec.mean))
    return tensor if spec.keep_float32 else tensor.to(torch.bfloat16)


def tensor_specs(recipe: Recipe) -> list[TensorSpec]:
    """All tensors of a checkpoint in file order: embedding, layers, final norm, head."""
    config, gains = recipe.config, recipe.gains
    hidden, vocabulary, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    specs = [TensorSpec("model.embed_tokens.weight", (vocabulary, hidden), gains.embedding)]
    for layer in range(layers):
        specs.extend(_layer(recipe, layer))
    specs.append(_norm(recipe, "model.norm.weight", hidden))
    specs.append(_linear("lm_head.weight", vocabulary, hidden, gains.head))
    return specs


def _linear(name: str, rows: int, columns: int, gain: float) -> TensorSpec:
    return TensorSpec(name, (rows, columns), gain / math.sqrt(columns))


def _norm(recipe: Recipe, name: str, size: int) -> TensorSpec:
    return TensorSpec(name, (size,), recipe.gains.norm_spread, mean=1.0)


def _layer(recipe: Recipe, layer: int) -> Iterator[TensorSpec]:
    prefix, hidden = f"model.layers.{layer}", recipe.config["hidden_size"]
    yield _norm(recipe, f"{prefix}.input_layernorm.weight", hidden)
    deepseek = "kv_lora_rank" in recipe.config
    yield from (_mla_attention if deepseek else _plain_attention)(recipe, f"{prefix}.self_attn")
    yield _norm(recipe, f"{prefix}.post_attention_layernorm.weight", hidden)
    if layer in recipe.moe_layers:
        yield from _moe(recipe, f"{prefix}.mlp")
    else:
        yield from _mlp(recipe, f"{prefix}.mlp", recipe.config["intermediate_size"])


def _mla_attention(recipe: Recipe, prefix: str) -> Iterator[TensorSpec]:
    config: Any = recipe.config
    gains, hidden, heads = recipe.gains, config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    kv_rank, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
    if q_rank is None:
        yield _linear(f"{prefix}.q_proj.weight", heads * (nope + rope), hidden, gains.attention_qk)
    else:
        yield _linear(f"{prefix}.q_a_proj.weight", q_rank, hidden, 1.0)
        yield _norm(recipe, f"{prefix}.q_a_layernorm.weight", q_rank)
        yield _linear(f"{prefix}.q_b_proj.weight", heads * (nope + rope), q_rank, gains.attention_qk)
    yield _linear(f"{prefix}.kv_a_proj_with_mqa.weight", kv_rank + rope, hidden, gains.attention_qk)
    yield _norm(recipe, f"{prefix}.kv_a_layernorm.weight", kv_rank)
    yield _linear(f"{prefix}.kv_b_proj.weight", heads * (nope + value), kv_rank, gains.attention_v)
    yield _linear(f"{prefix}.o_proj.weight", hidden, heads * value, gains.attention_output)


def _plain_attention(recipe: Recipe, prefix: str) -> Iterator[TensorSpec]:
    config, gains = recipe.config, recipe.gains
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield _linear(f"{prefix}.q_proj.weight", queries, hidden, 1.0)
    yield _linear(f"{prefix}.k_proj.weight", keys, hidden, 1.0)
    yield _linear(f"{prefix}.v_proj.weight", keys, hidden, gains.attention_v)
    yield _linear(f"{prefix}.o_proj.weight", hidden, queries, gains.attention_output)
    for name in ("q_norm", "k_norm"):
        yield TensorSpec(f"{prefix}.{name}.weight", (size,), gains.norm_spread, mean=gains.attention_qk)


def _mlp(recipe: Recipe, prefix: str, intermediate: int) -> Iterator[TensorSpec]:
    hidden, gains = recipe.config["hidden_size"], recipe.gains
    yield _linear(f"{prefix}.gate_proj.weight", intermediate, hidden, gains.feed_forward_up)
    yield _linear(f"{prefix}.up_proj.weight", intermediate, hidden, gains.feed_forward_up)
    yield _linear(f"{prefix}.down_proj.weight", hidden, intermediate, gains.feed_forward_down)


def _moe(recipe: Recipe, prefix: str) -> Iterator[TensorSpec]:
    config, gains = recipe.config, recipe.gains
    experts = config["n_routed_experts"] if "n_routed_experts" in config else config["num_experts"]
    intermediate = config["moe_intermediate_size"]
    yield _linear(f"{prefix}.gate.weight", experts, config["hidden_size"], gains.router)
    if config.get("topk_method") == "noaux_tc":
        bias = f"{prefix}.gate.e_score_correction_bias"
        yield TensorSpec(bias, (experts,), gains.router_bias_spread, keep_float32=True)
    for expert in range(experts):
        yield from _mlp(recipe, f"{prefix}.experts.{expert}", intermediate)
    shared = config.get("n_shared_experts", 0)
    if shared:
        yield from _mlp(recipe, f"{prefix}.shared_experts", intermediate * shared)
