# SPDX-License-Identifier: Apache-2.0
"""The MoE layer of an attention process: native router-side life cycle, experts elsewhere.

vLLM builds every MoE layer through ``FusedMoEFactory``, which instantiates ``RoutedExperts`` and ``MoERunner``. Both
are ``PluggableLayer``s, so subclasses registered out of tree take their place. The native constructors run unmodified.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from afd_plugin.config import GatePlacement, Role, SharedPlacement
from afd_plugin.model.beside import Beside
from afd_plugin.model.placeholders import RemoteCall, RoleStage


class RemoteMoEMethod(FusedMoEMethodBase):
    """The quantisation method of experts that live elsewhere: no weights, no kernel, no padding."""

    def create_weights(  # type: ignore[override]  # as vLLM's own FusedMoEMethodBase has it
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register nothing."""

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """Keep the sizes: padding is the business of the kernels, which run in the FFN."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig | None:
        """None, which vLLM's kernel warm-up accepts as "nothing to warm up"."""
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing was loaded."""


class RemoteRoutedExperts(RoutedExperts):
    """``RoutedExperts`` without parameters: only the choice of the quantisation method differs."""

    def _get_quant_method(
        self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        return RemoteMoEMethod(moe_config)


class RemoteExpertsStage(RoleStage):
    """Where loaders look for ``...experts.routed_experts``: missing here, but still with a quantisation method, which
    ``MoERunner._quant_method`` reads."""

    def __init__(self, module: RoutedExperts) -> None:
        super().__init__(Role.FFN, module)
        self.quant_method = module.quant_method


class RemoteMoERunner(MoERunner):
    """A ``MoERunner`` whose ``_forward_impl`` is one exchange with the FFN.

    ``forward`` enters the native opaque op and returns its result: the native tail (routed scaling, shared experts,
    all-reduce, output transform) runs in the FFN, whose runner is native.
    """

    gate_placement: GatePlacement = GatePlacement.FFN
    """Set by the build scope before the model is constructed."""

    shared_placement: SharedPlacement = SharedPlacement.FFN
    """As ``gate_placement``."""

    moved: tuple[nn.Module, ...]
    """Modules that the FFN owns; kept out of the module tree."""

    beside: Beside | None
    """Shared experts that stay here; they are children of the MoE block, not of the runner."""

    native_experts: RoutedExperts
    """What the factory built as experts; the scan checks that it holds nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = self.shared_placement is SharedPlacement.ATTENTION
        shared = (kwargs.get("shared_experts"), kwargs.get("shared_expert_gate"))
        transforms = (self.routed_input_transform, self.routed_output_transform)
        moved = [module for module in (*(() if own else shared), *transforms) if module is not None]
        self.external_gate = self.gate is None
        if self.gate is not None and self.gate_placement is GatePlacement.FFN:
            moved.append(self.gate)
            self.gate = None
        # A plain dictionary entry: a registered child would be loaded and counted.
        self.__dict__["moved"] = tuple(moved)
        self.__dict__["native_experts"] = self.routed_experts
        self.__dict__["beside"] = Beside(shared[0]) if own and shared[0] is not None else None
        self.routed_experts = RemoteExpertsStage(self.routed_experts)  # type: ignore[assignment]
        self.shared_expert_gate = None
        self._shared_experts = None
        # The native choice between the one-output and the two-output op depends on the shared experts just removed.
        self._forward_entry = self._select_forward()
        self._remote: RemoteCall | None = None

    @property
    def router_logits_width(self) -> int:
        """Logits per row that attention must send; 0 when the FFN runs the gate."""
        return self.moe_config.num_logical_experts if self.gate is not None or self.external_gate else 0

    def bind(self, remote: RemoteCall) -> None:
        """Connect the unit to the data plane; called once, after the rendezvous."""
        self._remote = remote

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        """Consume what a loader still offers: an unconsumed group would be searched among the children."""
        for _ in weights:
            pass
        return ()

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output: torch.Tensor = self._forward_entry(
            hidden_states, router_logits, shared_experts_input, input_ids, self._encode_layer_name(), 0
        )
        return output

    def _forward_impl(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._remote is None:
            raise RuntimeError(f"{self.layer_name} was called before the roles were connected")
        if self.beside is None:
            return self._exchange(self._remote, hidden_states, router_logits)
        with self.beside.running(hidden_states) as shared:
            routed = self._exchange(self._remote, hidden_states, router_logits)
        return shared() + routed

    def _exchange(
        self, remote: RemoteCall, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor:
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        elif not self.external_gate:
            return remote(hidden_states, None)
        return remote(hidden_states, router_logits)
