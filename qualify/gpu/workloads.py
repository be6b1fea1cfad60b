# SPDX-License-Identifier: Apache-2.0
"""What the engines of a comparison are asked, and how two answers are compared. Pure: no torch, no vLLM."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afd_plugin.demo.parity import logprob_difference

PARITY_PROMPTS = 64
PARITY_TOKENS = 64
LOGPROBS = 3

Row = Mapping[str, Any]


def parity_prompts(vocabulary: int = 256, longest: int = 200) -> list[list[int]]:
    """64 prompts of 2 to 200 token ids, seeded; three share a prefix longer than a KV block."""
    draw = random.Random(20260729)
    prompts = [
        [draw.randrange(4, vocabulary) for _ in range(draw.randint(2, longest))]
        for _ in range(PARITY_PROMPTS)
    ]
    prefix = [draw.randrange(4, vocabulary) for _ in range(40)]
    for index in (5, 25, 45):
        prompts[index] = prefix + prompts[index][:50]
    return prompts


def bench_prompts(batch: int, repeat: int, vocabulary: int) -> list[list[int]]:
    """``batch`` prompts of 128 token ids; the same for every engine, another set for each repeat."""
    draw = random.Random(batch * 1000 + repeat)
    return [[draw.randrange(3, vocabulary) for _ in range(128)] for _ in range(batch)]


@dataclass(frozen=True)
class Agreement:
    """How far two runs agree. Logprob entries are compared up to and including the first differing token."""

    prompts: int
    equal_token_lists: int
    tokens: int
    equal_tokens: int
    logprobs: int
    equal_logprobs: int
    largest_difference: float
    largest_first_difference: float
    """Over first positions alone, where both sides have read the same text."""

    @property
    def exact(self) -> bool:
        """Whether every token and every logprob is equal to the bit."""
        return self.equal_token_lists == self.prompts and self.equal_logprobs == self.logprobs


def compare(first: Sequence[Row], second: Sequence[Row]) -> Agreement:
    """Compare rows of ``{"tokens": [...], "logprobs": [[[token, value], ...], ...]}``; ValueError for no answer."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} answers against {len(second)}")
    equal_lists = tokens = equal_tokens = entries = equal_entries = 0
    largest = largest_first = 0.0
    for mine, theirs in zip(first, second, strict=True):
        same = [a == b for a, b in zip(mine["tokens"], theirs["tokens"], strict=True)]
        equal_lists += all(same)
        tokens += len(same)
        equal_tokens += sum(same)
        upto = next((index for index, equal in enumerate(same) if not equal), len(same) - 1) + 1
        positions = zip(mine["logprobs"][:upto], theirs["logprobs"][:upto], strict=True)
        for position, (one, other) in enumerate(positions):
            left, right = dict(map(tuple, one)), dict(map(tuple, other))
            if not all(map(math.isfinite, (*left.values(), *right.values()))):
                raise ValueError("a log probability is not finite")
            entries += len(left)
            equal_entries += sum(right.get(token) == value for token, value in left.items())
            difference = max(logprob_difference(left, right), logprob_difference(right, left))
            largest = max(largest, difference)
            largest_first = largest_first if position else max(largest_first, difference)
    return Agreement(
        len(first), equal_lists, tokens, equal_tokens, entries, equal_entries, largest, largest_first
    )


V2_LITE: Mapping[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
"""The shape of DeepSeek-V2-Lite; served with random weights, since only its speed is measured."""
