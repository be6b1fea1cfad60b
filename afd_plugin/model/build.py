# SPDX-License-Identifier: Apache-2.0
"""Role-scoped construction of a native model.

While a model is built, torch's module-registration hook replaces what the role does not own by placeholders, at the
moment the native constructor attaches it, so its memory never adds up over layers. Modules are recognised by type
(``AttentionLayerBase``, ``MoERunner``, ``VocabParallelEmbedding``, ``LinearBase``) and by identity, never by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from afd_plugin.config import AFDConfig, DensePlacement, GatePlacement, Role, SharedPlacement
from afd_plugin.errors import ModelRefused
from afd_plugin.model.part_runner import PartMoERunner
from afd_plugin.model.placeholders import RemoteDense, RoleStage, drop, is_missing
from afd_plugin.model.remote_runner import RemoteMoERunner, RemoteRoutedExperts
from afd_plugin.model.shards import Shard, ShardRoutedExperts

Replacement = nn.Module | None
RegistrationHook = Callable[[nn.Module, str, "nn.Module | None"], Replacement]


class RoleBuild(ABC):
    """Scopes one model construction to a role.

    ``construction`` is entered before the native constructor runs; ``finish`` is called with the finished model before
    any weight is read. Both belong to the loader.
    """

    def __init__(self, config: AFDConfig) -> None:
        self.config = config

    @contextmanager
    def construction(self) -> Iterator[ExitStack]:
        """Install the hooks; the yielded stack may be closed early, once the model is built."""
        with ExitStack() as stack:
            hook: Callable[..., Any] = (
                self._on_registration
            )  # torch uses what a hook returns; its stub says None
            stack.enter_context(register_module_module_registration_hook(hook))
            self._enter(stack)
            yield stack

    def _enter(self, stack: ExitStack) -> None:  # noqa: B027 - a role may have none
        """Enter further scopes of the role."""

    @abstractmethod
    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> Replacement:
        """torch's hook: return a replacement for ``child``, or None to keep it."""

    @abstractmethod
    def finish(self, model: nn.Module) -> None:
        """Remove what only the whole model shows not to be owned."""


class AttentionBuild(RoleBuild):
    """Attention keeps everything but experts, their gate if placed on the FFN, and optionally dense MLPs."""

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(_out_of_tree({MoERunner: RemoteMoERunner, RoutedExperts: RemoteRoutedExperts}))
        RemoteMoERunner.gate_placement = self.config.gate
        RemoteMoERunner.shared_placement = self.config.shared

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> Replacement:
        if isinstance(child, RemoteMoERunner):
            self._drop_moved(parent, child)
        elif (
            self.config.dense is DensePlacement.FFN
            and isinstance(parent, nn.ModuleList)
            and child is not None
        ):
            for dense in dense_children(child):
                setattr(child, dense, RemoteDense.replacing(child.get_submodule(dense)))
        return None

    @staticmethod
    def _drop_moved(block: nn.Module, runner: RemoteMoERunner) -> None:
        """Replace the children of the MoE block that the runner took to the FFN, found by identity."""
        moved = {id(part) for module in runner.moved for part in module.modules()}
        for name, sibling in list(block.named_children()):
            if id(sibling) in moved:
                setattr(block, name, drop(Role.FFN, sibling))

    def finish(self, model: nn.Module) -> None:
        """Nothing is left to remove: experts never came into being."""


def holds_part(config: AFDConfig) -> bool:
    """Whether an FFN process computes only a part of each MoE layer's output."""
    return config.topology.ffn_shards > 1 or config.shared is SharedPlacement.ATTENTION


class FFNBuild(RoleBuild):
    """The FFN keeps MoE runners with what they own, and optionally dense MLPs; a shard keeps a part of the experts."""

    def _enter(self, stack: ExitStack) -> None:
        config, shards = self.config, self.config.topology.ffn_shards
        replaced: dict[type[PluggableLayer], type[PluggableLayer]] = {}
        if holds_part(config):
            replaced[MoERunner] = PartMoERunner
            PartMoERunner.with_shared = config.shared is SharedPlacement.FFN and config.member == 0
        if shards > 1:
            replaced[RoutedExperts] = ShardRoutedExperts
            ShardRoutedExperts.shard = Shard(config.member, shards, whole=not current_platform.is_cpu())
        stack.enter_context(_out_of_tree(replaced))

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> Replacement:
        if child is None or is_missing(child):
            return None
        if isinstance(child, VocabParallelEmbedding):
            return drop(Role.ATTENTION, child)
        if isinstance(parent, nn.ModuleList):
            # A finished decoder layer. Its list element must stay: models assert the class of their layers.
            if _contains(child, MoERunner) or _holds_attention(child):
                self._prune(child)
            return None
        if _holds_attention(child) and not _contains(child, (MoERunner, nn.ModuleList)):
            return drop(Role.ATTENTION, child)
        return None

    def finish(self, model: nn.Module) -> None:
        self._prune(model)
        if self.config.gate is GatePlacement.ATTENTION:
            for runner in model.modules():
                if isinstance(runner, MoERunner) and runner.gate is not None:
                    _give_up_gate(runner, runner.gate)

    def _prune(self, root: nn.Module) -> None:
        """Replace every module below ``root`` that is neither part of a runner nor a dense MLP of the FFN."""
        kept = {
            id(part)
            for runner in root.modules()
            if isinstance(runner, MoERunner)
            for part in runner.modules()
        }
        if self.config.dense is DensePlacement.FFN:
            kept |= {id(part) for dense in dense_modules(root) for part in dense.modules()}
        self._prune_below(root, kept)

    def _prune_below(self, module: nn.Module, kept: set[int]) -> None:
        for name, child in list(module.named_children()):
            if is_missing(child) or id(child) in kept:
                continue
            if (
                any(id(part) in kept for part in child.modules())
                or _contains(child, nn.ModuleList)
                or isinstance(module, nn.ModuleList)
            ):
                self._prune_below(child, kept)
            elif next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
                setattr(module, name, drop(Role.ATTENTION, child))


def dense_children(layer: nn.Module) -> list[str]:
    """Names of the dense MLPs among the direct children of a finished decoder layer without experts.

    They hold linear layers and no attention; a layer with experts has none.
    """
    if is_missing(layer) or _contains(layer, MoERunner) or not _holds_attention(layer):
        return []
    return [
        name
        for name, child in layer.named_children()
        if (isinstance(child, RemoteDense) or not is_missing(child))
        and not _holds_attention(child)
        and (isinstance(child, RemoteDense) or _contains(child, LinearBase))
    ]


def dense_modules(root: nn.Module) -> Iterator[nn.Module]:
    """The dense MLPs of every decoder layer at or below ``root``."""
    layers = (layer for layers in root.modules() if isinstance(layers, nn.ModuleList) for layer in layers)
    for layer in (root, *layers):
        for name in dense_children(layer):
            yield layer.get_submodule(name)


def _give_up_gate(runner: MoERunner, gate: nn.Module) -> None:
    """Leave the gate to attention but keep what the experts' router shares with it (a correction bias)."""
    shared = {id(parameter) for parameter in runner.routed_experts.parameters()}
    for name, parameter in list(gate.named_parameters(recurse=False)):
        if id(parameter) not in shared:
            gate.register_parameter(name, None)
    # Its own method would pack a weight that is gone.
    gate.quant_method = None  # type: ignore[assignment]
    runner.gate = None


def _contains(module: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(part, kind) for part in module.modules())


def _holds_attention(module: nn.Module) -> bool:
    return any(
        isinstance(part, AttentionLayerBase)
        or (isinstance(part, RoleStage) and part.stage_name == Role.ATTENTION.value)
        for part in module.modules()
    )


@contextmanager
def _out_of_tree(replacements: dict[type[PluggableLayer], type[PluggableLayer]]) -> Iterator[None]:
    """Register layer replacements for the duration of a build, and for nothing else in the process."""
    for native in replacements:
        if native.__name__ in op_registry_oot:
            raise ModelRefused(
                f"another plugin already replaces vLLM's {native.__name__} "
                f"({op_registry_oot[native.__name__]}); AFD cannot share that seam. Uninstall or disable it."
            )
    try:
        for native, replacement in replacements.items():
            native.register_oot(replacement)
        yield
    finally:
        for native in replacements:
            op_registry_oot.pop(native.__name__, None)
