# SPDX-License-Identifier: Apache-2.0
"""The runner of a MoE layer, which attention replaces and the FFN keeps."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="moe-runner",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner",
        kind=SeamKind.SUBCLASS,
        signature="class MoERunner(MoERunnerInterface)",
        sha256="01ba3ae3cc8775aebf883b5cfbc4ecd8917828ad2551405bba07cd0e97ebce3b",
        invariant=(
            "`FusedMoEFactory` builds every MoE layer as a `MoERunner`; whoever asks it for state "
            "does so through the attributes and methods named here."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=(
            "afd_plugin.model.build",
            "afd_plugin.model.part_runner",
            "afd_plugin.model.remote_runner",
            "afd_plugin.model.scan",
            "afd_plugin.v1.worker.ffn_role",
            "afd_plugin.v1.worker.ffn_service",
        ),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-runner-init",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.__init__",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def __init__(self, layer_name: str, moe_config: FusedMoEConfig, router: FusedMoERouter, "
            "routed_experts: RoutedExperts, enable_dbo: bool=False, gate: torch.nn.Module | "
            "None=None, shared_experts: torch.nn.Module | None=None, shared_expert_gate: "
            "torch.nn.Module | None=None, routed_input_transform: torch.nn.Module | None=None, "
            "routed_output_transform: torch.nn.Module | None=None, routed_scaling_factor: float=1.0)"
        ),
        sha256="ee995192d02cdc84c5029535aa0c336cac8642b866270944bb97968044e4a0a8",
        invariant=(
            "Shared experts, their gate and the transforms arrive as keywords and are kept; the "
            "runner registers itself in the static forward context under its layer name."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.part_runner", "afd_plugin.model.remote_runner"),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-runner-forward",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.forward",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor, input_ids: "
            "torch.Tensor | None=None, shared_experts_input: torch.Tensor | None=None) -> "
            "torch.Tensor"
        ),
        sha256="a4626b36ab921eeba7dd5c039eb99a2e8add04f8431799f85556323e695119ea",
        invariant=(
            "Callers pass hidden states and router logits by these names; scaling, shared experts "
            "and reduction happen here and in nothing it calls, so that leaving them to the FFN "
            "applies them once."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-runner-forward-impl",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._forward_impl",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def _forward_impl(self, hidden_states: torch.Tensor, router_logits: torch.Tensor, "
            "shared_experts_input: torch.Tensor | None, input_ids: torch.Tensor | None=None) -> "
            "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
        ),
        sha256="94de336857d931044a17b43cc4ad10ec8962f2ab74a32d201afcfe4c3305800a",
        invariant=(
            "The opaque op (or the plain entry on the CPU) ends in this method with these four "
            "arguments and returns its result unchanged."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-runner-load-weights",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.load_weights",
        kind=SeamKind.OVERRIDE,
        signature="def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]",
        sha256="472be7f1880e71a9f917c45dbbbf0582216b587e4488b4707222efbdb3f4bce7",
        invariant=(
            "A loader hands over an iterator of the layer's weights and takes the returned names as "
            "loaded; an iterator that is not consumed is searched for children."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-runner-forward-entry",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._forward_entry",
        kind=SeamKind.STATE_WRITE,
        signature="self._forward_entry",
        sha256="5de3a3ab00b3b0db026d3cdae98ee374c179bf8b02a15119676dfa1d0c70fd4c",
        invariant="Holds what `_select_forward` returned, and is called with six positional arguments.",
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-runner-shared-experts-slot",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._shared_experts",
        kind=SeamKind.STATE_WRITE,
        signature="self._shared_experts: SharedExperts | None | self._shared_experts",
        sha256="9e47bceb9aeb2aaa1aea0b4c970f979009ba5749c7689942ef485be1723b0fec",
        invariant=(
            "None means that the layer has no shared experts, for the choice of the op as for "
            "everything else."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-runner-gate",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.gate",
        kind=SeamKind.STATE_WRITE,
        signature="self.gate",
        sha256="e261d146324ba176232c858ca60260a6e8520b5625ccdceb48105efaada72587",
        invariant=(
            "With a gate the runner computes router logits itself; with None it takes the ones it is given."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=(
            "afd_plugin.model.build",
            "afd_plugin.model.remote_runner",
            "afd_plugin.model.scan",
            "afd_plugin.v1.worker.attention_role",
        ),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-runner-routed-experts",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.routed_experts",
        kind=SeamKind.STATE_WRITE,
        signature="self.routed_experts",
        sha256="71b7784e78ea63d10b442e756564b058e583e94f34a1d4e67ed695bcf3d91caf",
        invariant=(
            "Only the runner's own methods use it after construction; its `quant_method` is read "
            "through `_quant_method`."
        ),
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=(
            "afd_plugin.model.build",
            "afd_plugin.model.remote_runner",
            "afd_plugin.model.scan",
        ),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="moe-runner-shared-expert-gate",
        symbol="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.shared_expert_gate",
        kind=SeamKind.STATE_WRITE,
        signature="self.shared_expert_gate",
        sha256="71c307655c0c2953191e2027f0ddc5197d518958db2fc510ae0077c05ffaf89f",
        invariant="Used only together with the shared experts.",
        plan="propose upstream: a runner that says which of its parts a process owns",
        used_by=("afd_plugin.model.remote_runner",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="moe-runner-attributes",
        owner="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner",
        names={
            "_encode_layer_name": "e1ab8edb41ac3ece",
            "_select_forward": "eea6a71ba05aae2a",
            "layer_name": "b3d17633302e30d4",
            "moe_config": "1c62d9b5afe2a74e",
            "routed_input_transform": "995b88cdc7f201bf",
            "routed_output_transform": "9b8bed6ea9e9aad4",
            "router": "4d4c208033678625",
            "shared_experts": "5c4b47304b752a6b",
        },
        invariant="Parts and names of a MoE layer as its constructor left them.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="moe-runner-interface",
        owner="vllm.model_executor.layers.fused_moe.runner.moe_runner_interface:",
        names={
            "MoERunnerInterface": "a0096ff1e4595bbd",
        },
        invariant="The base of every MoE runner, native or not: how layers that escaped are found.",
        afd_tests=evidence.MODEL,
    ),
)
