# SPDX-License-Identifier: Apache-2.0
"""Planted faults: siblings of a checkpoint, wrong in one known way, to be loaded by the FFN side only.

A parity check that passes with one of them loaded checks nothing. Each fault edits weights, so no product
code is touched and the fault arrives through the same path as the right weights.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from afd_plugin.demo.checkpoints import build_once, weight_map
from afd_plugin.demo.recipes import Recipe

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

SHARED_SCALE = 0.4
_LAYER = re.compile(r"model\.layers\.(\d+)\.mlp\.")


class Fault(Enum):
    """What is wrong; the value is part of the faulty checkpoint's folder name."""

    FFN_RETURNS_ZEROS = "ffn-returns-zeros"
    LAYERS_SWAPPED = "layers-swapped"
    EXPERT_SWAPPED = "expert-swapped"
    SHARED_DROPPED = "shared-dropped"
    SHARED_SCALED = "shared-scaled"
    ROUTER_BIAS_IGNORED = "router-bias-ignored"


@dataclass(frozen=True)
class _Site:
    """Where to plant: the MoE layers of a checkpoint."""

    layers: tuple[int, ...]


def faults_of(recipe: Recipe) -> tuple[Fault, ...]:
    """The faults that this model can have: it needs a shared expert or a router bias for some."""
    absent = set()
    if not recipe.config.get("n_shared_experts", 0):
        absent |= {Fault.SHARED_DROPPED, Fault.SHARED_SCALED}
    if recipe.config.get("topk_method") != "noaux_tc":
        absent.add(Fault.ROUTER_BIAS_IGNORED)
    return tuple(fault for fault in Fault if fault not in absent)


def plant(fault: Fault, recipe: Recipe, checkpoint: Path, cache: Path | None = None) -> Path:
    """The folder of a copy of `checkpoint` with `fault`, made now unless it exists.

    Args:
        fault: one of `faults_of(recipe)`; ValueError otherwise.
        recipe: the checkpoint's recipe, which tells its MoE layers.
        checkpoint: folder of the right checkpoint; left as it is.
        cache: folder that receives the copy; the checkpoint's own parent by default.
    """
    if fault not in faults_of(recipe):
        raise ValueError(f"{recipe.name} cannot have the fault {fault.value}: it has no such part")

    def build(folder: Path) -> None:
        for path in checkpoint.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy2(path, folder / path.name)
        _rewrite(checkpoint, folder, lambda tensors: _EDITS[fault](tensors, _Site(recipe.moe_layers)))

    parent = checkpoint.parent if cache is None else cache
    return build_once(parent / f"{checkpoint.name}-{fault.value}", build)


def _rewrite(source: Path, target: Path, edit: "Callable[[Tensors], Tensors]") -> None:
    from safetensors.torch import load_file, save_file

    files = weight_map(source)
    tensors: Tensors = {}
    for name in sorted(set(files.values())):
        tensors.update(load_file(source / name))
    edited = edit(tensors)
    if edited.keys() != tensors.keys():
        raise ValueError("a planted fault changed the tensor names of the checkpoint")
    for name in sorted(set(files.values())):
        group = {key: edited[key].contiguous() for key, file in files.items() if file == name}
        save_file(group, target / name, metadata={"format": "pt"})


def _swap_prefixes(tensors: "Tensors", first: str, second: str) -> "Tensors":
    """Exchange the tensors whose names begin with `first` with those that begin with `second`."""
    swapped = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith(first):
            swapped[second + name.removeprefix(first)] = tensor
        elif name.startswith(second):
            swapped[first + name.removeprefix(second)] = tensor
    return swapped


def _zeros(tensors: "Tensors", site: _Site) -> "Tensors":
    edited = dict(tensors)
    for name, tensor in tensors.items():
        layer = _LAYER.match(name)
        if layer and int(layer[1]) in site.layers and "down_proj" in name:
            edited[name] = tensor.new_zeros(tensor.shape)
    return edited


def _swap_layers(tensors: "Tensors", site: _Site) -> "Tensors":
    first, second = site.layers[:2]
    return _swap_prefixes(tensors, f"model.layers.{first}.mlp.", f"model.layers.{second}.mlp.")


def _swap_expert(tensors: "Tensors", site: _Site) -> "Tensors":
    experts = f"model.layers.{site.layers[0]}.mlp.experts."
    return _swap_prefixes(tensors, f"{experts}0.", f"{experts}1.")


def _scale_shared(tensors: "Tensors", scale: float) -> "Tensors":
    return {
        name: tensor * scale if name.endswith("shared_experts.down_proj.weight") else tensor
        for name, tensor in tensors.items()
    }


def _ignore_router_bias(tensors: "Tensors", site: _Site) -> "Tensors":
    return {
        name: tensor.new_zeros(tensor.shape) if name.endswith("e_score_correction_bias") else tensor
        for name, tensor in tensors.items()
    }


_EDITS: "Mapping[Fault, Callable[[Tensors, _Site], Tensors]]" = {
    Fault.FFN_RETURNS_ZEROS: _zeros,
    Fault.LAYERS_SWAPPED: _swap_layers,
    Fault.EXPERT_SWAPPED: _swap_expert,
    Fault.SHARED_DROPPED: lambda tensors, site: _scale_shared(tensors, 0.0),
    Fault.SHARED_SCALED: lambda tensors, site: _scale_shared(tensors, SHARED_SCALE),
    Fault.ROUTER_BIAS_IGNORED: _ignore_router_bias,
}
