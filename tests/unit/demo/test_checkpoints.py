# SPDX-License-Identifier: Apache-2.0
import json
import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afd_plugin.demo import checkpoints
from afd_plugin.demo.prompts import MAX_TOKENS, PROMPTS
from afd_plugin.demo.recipes import DEEPSEEK_V2, DEEPSEEK_V3, QWEN3_MOE, RECIPES, Recipe
from afd_plugin.demo.tokenizer import SPECIAL_TOKENS, vocabulary

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return checkpoints.make_all(tmp_path_factory.mktemp("checkpoints"))


def load(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for name in sorted(set(checkpoints.weight_map(folder).values())):
        tensors.update(load_file(folder / name))
    return tensors


def test_the_three_models_of_the_job_are_made() -> None:
    assert [recipe.architecture for recipe in RECIPES.values()] == [
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Qwen3MoeForCausalLM",
    ]


@pytest.mark.parametrize("recipe", [DEEPSEEK_V2, DEEPSEEK_V3])
def test_deepseek_has_the_real_mla_head_sizes_and_a_first_dense_layer(recipe: Recipe) -> None:
    config = recipe.config
    assert (config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]) == (128, 64, 128)
    assert config["kv_lora_rank"] == 512
    assert config["num_hidden_layers"] >= 4
    assert recipe.moe_layers == tuple(range(1, config["num_hidden_layers"]))
    assert config["n_shared_experts"] == 1
    assert config["routed_scaling_factor"] != 1
    assert "MHA path" in recipe.cpu_note


def test_v3_routes_with_sigmoid_bias_and_groups(made: dict[str, Path]) -> None:
    config = DEEPSEEK_V3.config
    assert (config["scoring_func"], config["topk_method"]) == ("sigmoid", "noaux_tc")
    assert config["n_group"] > config["topk_group"] > 1
    biases = {name: t for name, t in load(made["deepseek-v3"]).items() if name.endswith("correction_bias")}
    assert len(biases) == len(DEEPSEEK_V3.moe_layers)
    assert all(bias.dtype == torch.float32 and bias.std() > 0.1 for bias in biases.values())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_sizes_suit_the_expert_kernels_also_at_tp_2(recipe: Recipe) -> None:
    for key in ("hidden_size", "moe_intermediate_size", "intermediate_size"):
        assert recipe.config[key] % 64 == 0
    assert recipe.config["num_attention_heads"] % 2 == 0
    assert recipe.config["num_key_value_heads"] % 2 == 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_is_complete_and_sharded(made: dict[str, Path], name: str) -> None:
    folder, recipe = made[name], RECIPES[name]
    assert folder.name == f"{name}-{recipe.digest}"
    assert json.loads((folder / "config.json").read_text()) == dict(recipe.config)
    files = checkpoints.weight_map(folder)
    assert len(set(files.values())) == recipe.shards >= 2
    tensors = load(folder)
    assert tensors.keys() == files.keys() == checkpoints.tensor_bytes(folder).keys()
    assert checkpoints.tensor_bytes(folder) == {key: tensor.nbytes for key, tensor in tensors.items()}
    floats = {key for key, tensor in tensors.items() if tensor.dtype != torch.bfloat16}
    assert all(key.endswith("e_score_correction_bias") for key in floats)
    assert {path.name for path in folder.iterdir()} == {
        *files.values(),
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_same_recipe_makes_the_same_bits(made: dict[str, Path], tmp_path: Path) -> None:
    again = checkpoints.make("qwen3-moe", tmp_path)
    for path in sorted(made["qwen3-moe"].iterdir()):
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_another_seed_or_gain_is_another_checkpoint() -> None:
    digests = {
        QWEN3_MOE.digest,
        replace(QWEN3_MOE, seed=1).digest,
        replace(QWEN3_MOE, gains=replace(QWEN3_MOE.gains, head=1.0)).digest,
        replace(QWEN3_MOE, config={**QWEN3_MOE.config, "rms_norm_eps": 1e-5}).digest,
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AFD_CHECKPOINT_DIR": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/afd-plugin/checkpoints")),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache/afd-plugin/checkpoints"),
        ({}, Path.home() / ".cache/afd-plugin/checkpoints"),
    ],
)
def test_the_cache_is_where_the_environment_says(environment: Mapping[str, str], expected: Path) -> None:
    assert checkpoints.cache_folder(environment) == expected


def test_a_failed_build_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        checkpoints.build_once(tmp_path / "made", build)
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]


def _build_with_marker(folder: Path, log: Path) -> None:
    def build(target: Path) -> None:
        with log.open("a") as handle:
            handle.write("built\n")
        (target / "content").touch()

    checkpoints.build_once(folder, build)


def test_processes_that_want_the_same_checkpoint_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    processes = [context.Process(target=_build_with_marker, args=(tmp_path / "made", log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert log.read_text() == "built\n"
    assert (tmp_path / "made" / "content").exists()


def test_the_vocabulary_is_distinct_and_fills_the_model() -> None:
    tokens = vocabulary()
    assert len(tokens) == len(set(tokens)) == QWEN3_MOE.config["vocab_size"]
    assert tuple(tokens[:4]) == SPECIAL_TOKENS
    assert all(len(token) == 1 for token in tokens[4:])


def test_the_tokenizer_loads_offline_and_maps_one_character_to_one_token(made: dict[str, Path]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(made["deepseek-v2"] / "tokenizer.json"))
    text = "Ab\n é  x"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == DEEPSEEK_V2.config["bos_token_id"]
    assert len(encoded.ids) == len(text) + 1
    assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("日").ids[1] == SPECIAL_TOKENS.index("<unk>")


def test_the_prompts_are_eight_of_3_to_150_tokens_and_some_need_chunks() -> None:
    lengths = [len(prompt) + 1 for prompt in PROMPTS]
    assert len(PROMPTS) == len(set(PROMPTS)) == 8
    assert (min(lengths), max(lengths)) == (3, 150)
    assert sum(length > 64 for length in lengths) >= 3
    assert set("".join(PROMPTS)) <= set(vocabulary())
    assert MAX_TOKENS == 32
