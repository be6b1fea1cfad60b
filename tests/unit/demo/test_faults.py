# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest

from afd_plugin.demo import checkpoints
from afd_plugin.demo.faults import Fault, faults_of, plant
from afd_plugin.demo.recipes import DEEPSEEK_V2, DEEPSEEK_V3, QWEN3_MOE, RECIPES, Recipe

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

CASES = [(recipe, fault) for recipe in RECIPES.values() for fault in faults_of(recipe)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def load(folder: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name in sorted(set(checkpoints.weight_map(folder).values())):
        tensors.update(safetensors_torch.load_file(folder / name))
    return tensors


def changed(recipe: Recipe, fault: Fault, cache: Path) -> dict[str, tuple[Any, Any]]:
    right = checkpoints.make_recipe(recipe, cache)
    wrong = plant(fault, recipe, right)
    before, after = load(right), load(wrong)
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype for name in before)
    return {
        name: (before[name], after[name]) for name in before if not torch.equal(before[name], after[name])
    }


def test_each_model_has_every_fault_its_parts_allow() -> None:
    assert set(faults_of(DEEPSEEK_V3)) == set(Fault)
    assert set(faults_of(DEEPSEEK_V2)) == set(Fault) - {Fault.ROUTER_BIAS_IGNORED}
    assert set(faults_of(QWEN3_MOE)) == {
        Fault.FFN_RETURNS_ZEROS,
        Fault.LAYERS_SWAPPED,
        Fault.EXPERT_SWAPPED,
    }


@pytest.mark.parametrize(("recipe", "fault"), CASES, ids=lambda value: getattr(value, "name", None))
def test_a_fault_changes_only_what_the_ffn_owns(recipe: Recipe, fault: Fault, cache: Path) -> None:
    names = set(changed(recipe, fault, cache))
    assert names
    prefixes = tuple(f"model.layers.{layer}.mlp." for layer in recipe.moe_layers)
    assert all(name.startswith(prefixes) for name in names)


def test_zeros_silence_every_routed_and_shared_expert(cache: Path) -> None:
    pairs = changed(DEEPSEEK_V2, Fault.FFN_RETURNS_ZEROS, cache)
    layers, experts = len(DEEPSEEK_V2.moe_layers), DEEPSEEK_V2.config["n_routed_experts"]
    assert len(pairs) == layers * (experts + 1)
    assert all(name.endswith("down_proj.weight") and not after.any() for name, (_, after) in pairs.items())


def test_swapped_layers_exchange_gate_experts_and_shared_expert(cache: Path) -> None:
    pairs = changed(DEEPSEEK_V2, Fault.LAYERS_SWAPPED, cache)
    assert torch.equal(pairs["model.layers.1.mlp.gate.weight"][0], pairs["model.layers.2.mlp.gate.weight"][1])
    assert {name.split(".")[2] for name in pairs} == {"1", "2"}
    assert len(pairs) == 2 * (1 + 3 * (DEEPSEEK_V2.config["n_routed_experts"] + 1))


def test_one_swapped_expert_changes_two_experts_of_one_layer(cache: Path) -> None:
    pairs = changed(QWEN3_MOE, Fault.EXPERT_SWAPPED, cache)
    assert {name.rsplit(".", 2)[0] for name in pairs} == {
        "model.layers.0.mlp.experts.0",
        "model.layers.0.mlp.experts.1",
    }


@pytest.mark.parametrize(("fault", "scale"), [(Fault.SHARED_DROPPED, 0.0), (Fault.SHARED_SCALED, 0.4)])
def test_the_shared_expert_is_dropped_or_scaled_in_every_layer(
    fault: Fault, scale: float, cache: Path
) -> None:
    pairs = changed(DEEPSEEK_V3, fault, cache)
    assert len(pairs) == len(DEEPSEEK_V3.moe_layers)
    for before, after in pairs.values():
        torch.testing.assert_close(after, before * scale, rtol=0, atol=0)


def test_an_ignored_router_bias_is_zero_in_every_layer(cache: Path) -> None:
    pairs = changed(DEEPSEEK_V3, Fault.ROUTER_BIAS_IGNORED, cache)
    assert len(pairs) == len(DEEPSEEK_V3.moe_layers)
    assert not any(after.any() for _, after in pairs.values())


def test_a_fault_the_model_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qwen3-moe cannot have the fault shared-dropped"):
        plant(Fault.SHARED_DROPPED, QWEN3_MOE, tmp_path)
