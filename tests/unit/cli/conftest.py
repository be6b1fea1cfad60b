# SPDX-License-Identifier: Apache-2.0
"""Tiny models as config files only, enough for vLLM to build a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], str]:
    """Writes a ``config.json`` and returns its folder; one folder per content."""
    made: dict[str, str] = {}

    def make(config: dict[str, Any]) -> str:
        text = json.dumps(config, sort_keys=True)
        if text not in made:
            folder: Path = tmp_path_factory.mktemp("model")
            (folder / "config.json").write_text(text)
            made[text] = str(folder)
        return made[text]

    return make


@pytest.fixture(scope="session")
def moe_model(model_folder: Callable[[dict[str, Any]], str]) -> str:
    return model_folder(MOE)


@pytest.fixture(scope="session")
def dense_model(model_folder: Callable[[dict[str, Any]], str]) -> str:
    return model_folder(DENSE)
