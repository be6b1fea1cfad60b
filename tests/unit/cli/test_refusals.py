# SPDX-License-Identifier: Apache-2.0
"""Everything AFD cannot honour is refused by name, on the configuration objects vLLM itself builds.

vLLM is real here: each case is an `EngineArgs` and what vLLM makes of it. A few features exist on GPUs only, or need a
package that is not installed; vLLM refuses these before AFD can, so their rows are set on a built configuration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from afd_plugin.config import AFDConfig, Role
from afd_plugin.errors import ConfigRefused, ModelRefused
from afd_plugin.topology import Topology
from afd_plugin.v1.refusals import (
    RULES,
    WORKER_CLASSES,
    FeatureRefused,
    check_environment,
    check_vllm_config,
    check_vllm_version,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

pytestmark = pytest.mark.vllm

ATTENTION = AFDConfig(Role.ATTENTION)
FFN = AFDConfig(Role.FFN)
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}

Build = Callable[..., "VllmConfig"]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """vLLM on its CPU platform; what it writes into the environment while building is taken back."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def build(moe_model: str, environment: None) -> Build:
    """Builds vLLM's configuration from engine arguments, as the AFD launcher would set them."""

    def make(role: Role = Role.ATTENTION, **arguments: Any) -> VllmConfig:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext

        defaults: dict[str, Any] = {
            "model": moe_model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "distributed_executor_backend": "mp",
            "worker_cls": WORKER_CLASSES[role, "cpu"],
        }
        return EngineArgs(**{**defaults, **arguments}).create_engine_config(UsageContext.LLM_CLASS)

    return make


@pytest.mark.parametrize("afd", [ATTENTION, FFN], ids=["attention", "ffn"])
def test_a_plain_configuration_is_accepted(build: Build, afd: AFDConfig) -> None:
    check_vllm_config(build(afd.role), afd)


FEATURES: dict[str, dict[str, Any]] = {
    "ray": {"data_parallel_backend": "ray"},
    "executor": {"distributed_executor_backend": "external_launcher"},
    "pipeline-parallel": {"pipeline_parallel_size": 2},
    "decode-context-parallel": {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    "multi-node-role": {"tensor_parallel_size": 2, "nnodes": 2},
    "data-parallel-load-balancing": {"data_parallel_size": 2, "data_parallel_rank": 0},
    "expert-parallel-on-attention": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "native-microbatching": {"ubatch_size": 4, "all2all_backend": "deepep_low_latency"},
    "compilation-on-cpu": {"enforce_eager": False},
    "lora": {"enable_lora": True},
    "speculative-decoding": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    },
    "pooling": {"runner": "pooling", "convert": "embed"},
    "quantised-checkpoint": {"quantization": "fp8"},
    "returned-routed-experts": {"enable_return_routed_experts": True},
    "mega-moe": {"moe_backend": "deep_gemm_mega_moe"},
    "weight-offloading": {"cpu_offload_gb": 1},
    "kv-offloading": {"kv_offloading_size": 1.0},
    "kv-transfer": {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
    "kv-sharing-fast-prefill": {"kv_sharing_fast_prefill": True},
    "weight-transfer": {"weight_transfer_config": {"backend": "nccl"}},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_requested_feature_is_refused_by_name(build: Build, feature: str) -> None:
    config = build(**FEATURES[feature])
    with pytest.raises(FeatureRefused) as refused:
        check_vllm_config(config, ATTENTION)
    assert refused.value.feature == feature
    assert refused.value.exit_code == 2


def test_prefetching_weights_is_offloading_too(build: Build) -> None:
    config = build(offload_group_size=2, offload_num_in_group=1)
    with pytest.raises(FeatureRefused, match="offloading"):
        check_vllm_config(config, ATTENTION)


def _set(path: str, value: object) -> Callable[[VllmConfig], None]:
    def apply(config: VllmConfig) -> None:
        *parents, name = path.split(".")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        object.__setattr__(target, name, value)

    return apply


def _make_multimodal(config: VllmConfig) -> None:
    from vllm.config.multimodal import MultiModalConfig

    config.model_config.multimodal_config = MultiModalConfig()


GPU_ONLY: dict[str, tuple[AFDConfig, Callable[[VllmConfig], None]]] = {
    "prefill-context-parallel": (ATTENTION, _set("parallel_config.prefill_context_parallel_size", 2)),
    "expert-parallel-on-cpu": (
        AFDConfig(Role.FFN, Topology(ffn_tp=2, expert_parallel=True)),
        _set("parallel_config.enable_expert_parallel", True),
    ),
    "eplb": (ATTENTION, _set("parallel_config.enable_eplb", True)),
    "elastic-expert-parallel": (ATTENTION, _set("parallel_config.enable_elastic_ep", True)),
    "fault-tolerance": (ATTENTION, _set("parallel_config.enable_fault_tolerance", True)),
    "microbatches-on-cpu": (replace(ATTENTION, microbatches=2), lambda config: None),
    "sequence-parallel-compilation": (ATTENTION, _set("compilation_config.pass_config.enable_sp", True)),
    "graph-mode": (ATTENTION, _set("device_config.device_type", "cuda")),
    "diffusion": (ATTENTION, _set("model_config.hf_config.canvas_length", 8)),
    "sleep-mode": (FFN, _set("model_config.enable_sleep_mode", True)),
    "multimodal-input": (ATTENTION, _make_multimodal),
    "v2-model-runner": (ATTENTION, lambda config: None),
}


@pytest.mark.parametrize("feature", GPU_ONLY)
def test_a_feature_of_gpus_or_other_packages_is_refused_by_name(
    build: Build, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    afd, apply = GPU_ONLY[feature]
    config = build(afd.role)
    apply(config)
    if feature == "graph-mode":
        from vllm.config import CUDAGraphMode

        config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    if feature == "v2-model-runner":
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(FeatureRefused) as refused:
        check_vllm_config(config, afd)
    assert refused.value.feature == feature


def test_every_rule_has_a_case() -> None:
    assert {rule.feature for rule in RULES} == FEATURES.keys() | GPU_ONLY.keys()


def test_text_only_serving_of_a_multimodal_model_is_accepted(build: Build) -> None:
    from vllm.config.multimodal import MultiModalConfig

    config = build()
    config.model_config.multimodal_config = MultiModalConfig(language_model_only=True)
    check_vllm_config(config, ATTENTION)


def test_a_model_without_experts_is_refused(build: Build, dense_model: str) -> None:
    with pytest.raises(ModelRefused, match="Qwen3ForCausalLM has no MoE layer"):
        check_vllm_config(build(model=dense_model), ATTENTION)


@pytest.mark.parametrize(
    ("role", "arguments", "topology", "message"),
    [
        (Role.ATTENTION, {"tensor_parallel_size": 2}, Topology(), "tensor_parallel_size is 2"),
        (Role.ATTENTION, {}, Topology(attention_dp=2), "data_parallel_size is 1"),
        (Role.FFN, {"tensor_parallel_size": 2}, Topology(), "1A1F needs 1"),
        (Role.FFN, {}, Topology(attention_dp=2, ffn_dp=2), "2A2F needs 2"),
        (
            Role.FFN,
            {"tensor_parallel_size": 2},
            Topology(ffn_tp=2, expert_parallel=True),
            "expert_parallel is True",
        ),
    ],
)
def test_parallel_sizes_that_contradict_the_topology_are_refused(
    build: Build, role: Role, arguments: dict[str, Any], topology: Topology, message: str
) -> None:
    with pytest.raises(ConfigRefused, match=message):
        check_vllm_config(build(role, **arguments), AFDConfig(role, topology))


@pytest.mark.parametrize("worker", ["auto", WORKER_CLASSES[Role.FFN, "cpu"]])
def test_a_worker_class_of_another_role_is_refused(build: Build, worker: str) -> None:
    with pytest.raises(ConfigRefused, match="--worker-cls"):
        check_vllm_config(build(worker_cls=worker), ATTENTION)


@pytest.mark.parametrize("version", ["0.27.0", "0.28.1", "0.28.0rc1", "0.28.0+cu129", "dev"])
def test_another_vllm_version_is_refused(version: str) -> None:
    with pytest.raises(ConfigRefused, match="exactly"):
        check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.28.0", "0.28.0+cpu"])
def test_the_supported_version_is_accepted(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_a_request_for_the_v2_runner_in_the_environment_is_refused(value: str, refused: bool) -> None:
    env = {"VLLM_USE_V2_MODEL_RUNNER": value}
    if not refused:
        check_environment(env)
        return
    with pytest.raises(FeatureRefused, match="V1 model runner only"):
        check_environment(env)


def test_a_refusal_survives_the_way_between_processes() -> None:
    error = FeatureRefused("lora", "LoRA is not supported.")
    kind, arguments = error.__reduce__()
    again = kind(*arguments)
    assert (again.feature, str(again)) == ("lora", "LoRA is not supported.")
