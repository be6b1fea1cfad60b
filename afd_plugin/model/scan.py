# SPDX-License-Identifier: Apache-2.0
"""What a built model consists of: its remote units, and proof that nothing escaped the seam."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface

from afd_plugin.config import AFDConfig, DensePlacement, GatePlacement, Role
from afd_plugin.errors import ModelRefused
from afd_plugin.model.build import dense_modules, holds_part
from afd_plugin.model.part_runner import PartMoERunner
from afd_plugin.model.placeholders import RemoteDense
from afd_plugin.model.remote_runner import RemoteMoERunner, RemoteRoutedExperts
from afd_plugin.model.shards import ShardRoutedExperts
from afd_plugin.plan import RemoteUnit, UnitKind


@dataclass(frozen=True)
class BoundUnit:
    """A unit of the handshake and the module that stands for it in this process."""

    unit: RemoteUnit
    module: nn.Module


def find_units(model: nn.Module, config: AFDConfig, num_experts: int) -> tuple[BoundUnit, ...]:
    """The units of ``model`` in execution order; raises ``ModelRefused`` if an MoE layer escaped the seam.

    ``num_experts`` is the model's count of routed experts, used to recognise stray expert weights.
    """
    dense_at_ffn = config.role is Role.FFN and config.dense is DensePlacement.FFN
    dense = {id(module) for module in dense_modules(model)} if dense_at_ffn else set()
    found: list[BoundUnit] = []
    for name, module in model.named_modules():
        if isinstance(module, MoERunnerInterface):
            found.append(BoundUnit(_experts_unit(len(found), name, module, config), module))
        elif isinstance(module, RemoteDense) or id(module) in dense:
            found.append(BoundUnit(RemoteUnit(len(found), name, UnitKind.DENSE), module))
    if not any(bound.unit.kind is UnitKind.EXPERTS for bound in found):
        raise ModelRefused(
            f"{type(model).__name__} has no MoE layer that vLLM builds through FusedMoEFactory; AFD serves "
            "MoE models only."
        )
    if config.role is Role.ATTENTION:
        _refuse_stray_experts(model, num_experts)
    return tuple(found)


def _experts_unit(index: int, name: str, module: MoERunnerInterface, config: AFDConfig) -> RemoteUnit:
    if config.role is Role.ATTENTION:
        if type(module) is not RemoteMoERunner:
            raise _escaped(name, module)
        experts = module.native_experts
        if type(experts) is not RemoteRoutedExperts:
            raise _escaped(f"{name}.routed_experts", experts)
        width = module.router_logits_width
    else:
        sharded = config.topology.ffn_shards > 1
        if type(module) is not (PartMoERunner if holds_part(config) else MoERunner):
            raise _escaped(name, module)
        if type(module.routed_experts) is not (ShardRoutedExperts if sharded else RoutedExperts):
            raise _escaped(f"{name}.routed_experts", module.routed_experts)
        at_attention = module.gate is None or config.gate is GatePlacement.ATTENTION
        width = module.moe_config.num_logical_experts if at_attention else 0
    if module.routed_input_transform is not None or module.routed_output_transform is not None:
        raise ModelRefused(
            f"{name} transforms its hidden states (a latent MoE); AFD has not qualified that family."
        )
    router = module.router
    if isinstance(router, FusedTopKBiasRouter) and router._hash_indices_table is not None:
        raise ModelRefused(f"{name} routes by token id (hash layers); AFD has not qualified that family.")
    return RemoteUnit(index, name, UnitKind.EXPERTS, width)


def _escaped(name: str, module: nn.Module) -> ModelRefused:
    return ModelRefused(
        f"the MoE layer {name} is a {type(module).__module__}.{type(module).__qualname__}, which vLLM does not build "
        "as a plain MoERunner with RoutedExperts; it escapes the AFD seam and the model is refused."
    )


def _refuse_stray_experts(model: nn.Module, num_experts: int) -> None:
    """Refuse expert weights outside any runner (mega-MoE and the like keep them in modules of their own)."""
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            raise _escaped(name, module)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 3 and num_experts > 1 and parameter.shape[0] == num_experts:
            raise ModelRefused(
                f"the parameter {name} {tuple(parameter.shape)} looks like the weights of {num_experts} experts "
                "outside the AFD seam; the model is refused."
            )


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``; meta tensors hold none."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of parameters a role holds before kernels repack them, split by what they serve."""

    total: int
    routed_experts: int
    shared_experts: int
    gate: int
    other: int


def held_bytes(model: nn.Module) -> HeldBytes:
    """Count the parameters of ``model`` by their place in its MoE runners.

    A correction bias that the gate shares with its experts counts with the experts, whose router uses it.
    """
    routed: list[torch.Tensor] = []
    shared: list[torch.Tensor] = []
    gate: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, MoERunner):
            routed += module.routed_experts.parameters()
            if module.shared_experts is not None:
                shared += module.shared_experts.parameters()
            if module.gate is not None:
                gate += [p for p in module.gate.parameters() if not any(p is r for r in routed)]
    total = tensor_bytes(model.parameters())
    parts = (tensor_bytes(routed), tensor_bytes(shared), tensor_bytes(gate))
    return HeldBytes(total, *parts, total - sum(parts))
