# SPDX-License-Identifier: Apache-2.0
"""What AFD refuses in a finished vLLM configuration, before anything is served.

:func:`check_vllm_config` runs in the launcher's child on the config vLLM built, and again in every
worker, so that the plain ``vllm serve --worker-cls ...`` form is held to the same rules. Everything not
known to be exact is refused by name: a rule is one row of :data:`RULES`, a pure predicate over vLLM's own
typed objects. Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from afd_plugin import VLLM_VERSION
from afd_plugin.config import AFDConfig, Role
from afd_plugin.errors import ConfigRefused, ModelRefused, UnsupportedFeature

if TYPE_CHECKING:
    from vllm.config import VllmConfig

V2_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
ACCEPTED_VERSIONS = (VLLM_VERSION, f"{VLLM_VERSION}+cpu")

WORKER_CLASSES: Mapping[tuple[Role, str], str] = {
    (Role.ATTENTION, "cuda"): "afd_plugin.v1.worker.attention_worker.AFDAttentionWorker",
    (Role.FFN, "cuda"): "afd_plugin.v1.worker.ffn_worker.AFDFFNWorker",
    (Role.ATTENTION, "cpu"): "afd_plugin.v1.worker.cpu_attention_worker.CPUAFDAttentionWorker",
    (Role.FFN, "cpu"): "afd_plugin.v1.worker.cpu_ffn_worker.CPUAFDFFNWorker",
}
"""The value of ``--worker-cls`` by role and device type."""


class FeatureRefused(UnsupportedFeature):
    """A row of :data:`RULES` matched.

    Args:
        feature: The row's identifier, for tables and tests.
        message: The sentence.
    """

    name = "unsupported-feature"

    def __init__(self, feature: str, message: str) -> None:
        super().__init__(message)
        self.feature = feature

    def __reduce__(self) -> tuple[type[FeatureRefused], tuple[str, str]]:
        return type(self), (self.feature, self.message)


@dataclass(frozen=True)
class Rule:
    """One feature that AFD refuses: when it is present, and what to tell the user."""

    feature: str
    present: Callable[[VllmConfig, AFDConfig], bool]
    sentence: str


def _multimodal(config: VllmConfig, afd: AFDConfig) -> bool:
    settings = config.model_config.multimodal_config
    return settings is not None and not settings.language_model_only


def _graphs(config: VllmConfig, afd: AFDConfig) -> bool:
    mode = config.compilation_config.cudagraph_mode
    return config.device_config.device_type != "cpu" and mode.name not in ("NONE", "FULL_DECODE_ONLY")


def _compiled_on_cpu(config: VllmConfig, afd: AFDConfig) -> bool:
    return config.device_config.device_type == "cpu" and not config.model_config.enforce_eager


def _quantised(config: VllmConfig, afd: AFDConfig) -> bool:
    return config.model_config.quantization is not None or config.model_config.is_quantized


def _weights_offloaded(config: VllmConfig, afd: AFDConfig) -> bool:
    offload = config.offload_config
    return (
        offload.offload_backend != "auto"
        or offload.uva.cpu_offload_gb > 0
        or offload.prefetch.offload_group_size > 0
    )


def _microbatches_on_cpu(config: VllmConfig, afd: AFDConfig) -> bool:
    return afd.microbatches > 1 and config.device_config.device_type == "cpu"


def _expert_parallel_on_cpu(config: VllmConfig, afd: AFDConfig) -> bool:
    return config.parallel_config.enable_expert_parallel and config.device_config.device_type == "cpu"


def _on_attention(present: Callable[[VllmConfig], bool]) -> Callable[[VllmConfig, AFDConfig], bool]:
    return lambda config, afd: afd.role is Role.ATTENTION and present(config)


RULES: tuple[Rule, ...] = (
    Rule(
        "ray",
        lambda c, a: c.parallel_config.use_ray or c.parallel_config.data_parallel_backend == "ray",
        "Ray is not qualified under AFD; drop --distributed-executor-backend ray and "
        "--data-parallel-backend ray.",
    ),
    Rule(
        "executor",
        lambda c, a: c.parallel_config.distributed_executor_backend != "mp",
        "AFD needs vLLM's multiprocessing executor, the only one that notices a dead worker; "
        "set --distributed-executor-backend mp or drop the option.",
    ),
    Rule(
        "v2-model-runner",
        lambda c, a: c.use_v2_model_runner,
        f"vLLM chose its V2 model runner, which AFD does not support; set {V2_RUNNER_VARIABLE}=0 in "
        "every process.",
    ),
    Rule(
        "pipeline-parallel",
        lambda c, a: c.parallel_config.pipeline_parallel_size > 1,
        "Pipeline parallelism is not supported under AFD; drop --pipeline-parallel-size.",
    ),
    Rule(
        "prefill-context-parallel",
        lambda c, a: c.parallel_config.prefill_context_parallel_size > 1,
        "Prefill context parallelism is not supported under AFD; drop --prefill-context-parallel-size.",
    ),
    Rule(
        "decode-context-parallel",
        lambda c, a: c.parallel_config.decode_context_parallel_size > 1,
        "Decode context parallelism is not supported under AFD; drop --decode-context-parallel-size.",
    ),
    Rule(
        "multi-node-role",
        lambda c, a: c.parallel_config.nnodes > 1,
        "One role may not span nodes; drop --nnodes and place the two roles on two hosts instead.",
    ),
    Rule(
        "data-parallel-load-balancing",
        lambda c, a: c.parallel_config.data_parallel_external_lb or c.parallel_config.data_parallel_hybrid_lb,
        "AFD runs all attention DP ranks behind one endpoint; drop vLLM's external or hybrid load "
        "balancing options.",
    ),
    Rule(
        "expert-parallel-on-attention",
        _on_attention(lambda c: c.parallel_config.enable_expert_parallel),
        "The attention role holds no experts, so it cannot run expert parallel (nor sequence-parallel MoE); "
        "drop --enable-expert-parallel there and use --ffn-ep.",
    ),
    Rule(
        "expert-parallel-on-cpu",
        _expert_parallel_on_cpu,
        "Expert parallelism crashes in vLLM 0.28.0's own CPU kernels; use --ffn-tp without --ffn-ep on CPU.",
    ),
    Rule(
        "eplb",
        lambda c, a: c.parallel_config.enable_eplb,
        "Expert parallel load balancing is not supported under AFD; drop --enable-eplb.",
    ),
    Rule(
        "elastic-expert-parallel",
        lambda c, a: c.parallel_config.enable_elastic_ep,
        "Elastic expert parallelism is not supported under AFD; drop --enable-elastic-ep.",
    ),
    Rule(
        "fault-tolerance",
        lambda c, a: c.parallel_config.enable_fault_tolerance,
        "vLLM's fault tolerance knows only its own ranks; drop --enable-fault-tolerance, AFD watches "
        "both roles itself.",
    ),
    Rule(
        "native-microbatching",
        lambda c, a: c.parallel_config.use_ubatching,
        "Microbatching under AFD is set by --microbatches 2; drop vLLM's --enable-dbo and --ubatch-size.",
    ),
    Rule(
        "microbatches-on-cpu",
        _microbatches_on_cpu,
        "vLLM disables microbatching on CPU; set --microbatches 1.",
    ),
    Rule(
        "sequence-parallel-compilation",
        lambda c, a: bool(c.compilation_config.pass_config.enable_sp),
        "The sequence-parallelism compilation pass is not supported under AFD; drop pass_config.enable_sp.",
    ),
    Rule(
        "compilation-on-cpu",
        _compiled_on_cpu,
        "On CPU torch.compile would trace into the exchange with the FFN; set --enforce-eager.",
    ),
    Rule(
        "graph-mode",
        _graphs,
        "AFD is qualified for eager mode and cudagraph_mode FULL_DECODE_ONLY; "
        "set --enforce-eager or -cc.cudagraph_mode=FULL_DECODE_ONLY.",
    ),
    Rule(
        "lora",
        lambda c, a: c.lora_config is not None,
        "LoRA is not supported under AFD; drop --enable-lora.",
    ),
    Rule(
        "speculative-decoding",
        lambda c, a: c.speculative_config is not None,
        "Speculative decoding is not supported under AFD; drop --speculative-config.",
    ),
    Rule(
        "diffusion",
        lambda c, a: c.model_config.is_diffusion,
        "Diffusion language models are not supported under AFD; serve an autoregressive MoE model.",
    ),
    Rule(
        "pooling",
        lambda c, a: c.model_config.runner_type != "generate",
        "AFD serves text generation only; drop --runner pooling.",
    ),
    Rule(
        "quantised-checkpoint",
        _quantised,
        "Quantised checkpoints are not qualified under AFD yet; use an unquantised one and drop "
        "--quantization.",
    ),
    Rule(
        "multimodal-input",
        _multimodal,
        "Multimodal input is not supported under AFD; add --language-model-only to serve the model's "
        "text part.",
    ),
    Rule(
        "returned-routed-experts",
        lambda c, a: c.model_config.enable_return_routed_experts,
        "Routing decisions are made on the FFN and are not returned; drop --enable-return-routed-experts.",
    ),
    Rule(
        "mega-moe",
        lambda c, a: c.kernel_config.moe_backend == "deep_gemm_mega_moe",
        "The mega-MoE backend bypasses the layer at which AFD splits the model; "
        "choose another --moe-backend than deep_gemm_mega_moe.",
    ),
    Rule(
        "sleep-mode",
        lambda c, a: c.model_config.enable_sleep_mode,
        "Sleep mode is not supported under AFD, since the FFN cannot sleep; drop --enable-sleep-mode.",
    ),
    Rule(
        "weight-offloading",
        _weights_offloaded,
        "Weight offloading is not supported under AFD; drop --cpu-offload-gb and the --offload-* options.",
    ),
    Rule(
        "kv-offloading",
        lambda c, a: c.cache_config.kv_offloading_size is not None,
        "KV cache offloading is not qualified under AFD; drop --kv-offloading-size.",
    ),
    Rule(
        "kv-transfer",
        lambda c, a: c.kv_transfer_config is not None or c.ec_transfer_config is not None,
        "KV and encoder cache transfer are not qualified under AFD; drop --kv-transfer-config and "
        "--ec-transfer-config.",
    ),
    Rule(
        "kv-sharing-fast-prefill",
        lambda c, a: c.cache_config.kv_sharing_fast_prefill,
        "KV sharing fast prefill is not qualified under AFD; drop --kv-sharing-fast-prefill.",
    ),
    Rule(
        "weight-transfer",
        lambda c, a: c.weight_transfer_config is not None,
        "Online weight transfer would reach one role only; drop --weight-transfer-config.",
    ),
)


def check_vllm_version(version: str) -> None:
    """Raise ``ConfigRefused`` unless ``version`` (``vllm.__version__``) is exactly the supported one."""
    if version not in ACCEPTED_VERSIONS:
        raise ConfigRefused(
            f"vLLM {version} is installed; this plugin works with vLLM {VLLM_VERSION} exactly, "
            f"so install that version or the plugin release made for {version}."
        )


def check_environment(env: Mapping[str, str]) -> None:
    """Raise ``FeatureRefused`` for a variable that asks for what AFD does not support."""
    if env.get(V2_RUNNER_VARIABLE, "0").strip() not in ("", "0"):
        raise FeatureRefused(
            "v2-model-runner",
            f"{V2_RUNNER_VARIABLE} is {env[V2_RUNNER_VARIABLE]!r}, but AFD runs vLLM's V1 model runner only; "
            "unset it or set it to 0.",
        )


def check_vllm_config(vllm_config: VllmConfig, afd_config: AFDConfig) -> None:
    """Raise one named refusal for the first thing in ``vllm_config`` that AFD cannot honour.

    Raises:
        ConfigRefused: wrong vLLM version, worker class of another role, parallel sizes that contradict
        the topology.
        FeatureRefused: a row of :data:`RULES` is present.
        ModelRefused: the model has no MoE layer.
    """
    from vllm import __version__

    check_vllm_version(__version__)
    if vllm_config.model_config is None:
        raise ModelRefused("The configuration names no model; AFD serves MoE models.")
    for rule in RULES:
        if rule.present(vllm_config, afd_config):
            raise FeatureRefused(rule.feature, rule.sentence)
    _check_model(vllm_config)
    _check_sizes(vllm_config, afd_config)
    _check_worker_class(vllm_config, afd_config)


def _check_model(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    if not model.is_moe:
        raise ModelRefused(
            f"{', '.join(model.architectures)} has no MoE layer, so there is nothing for an FFN role "
            "to serve; "
            "use plain vLLM for this model."
        )


def _check_sizes(vllm_config: VllmConfig, afd: AFDConfig) -> None:
    parallel, topology, role = vllm_config.parallel_config, afd.topology, afd.role.value
    if afd.role is Role.ATTENTION:
        expected = topology.attention_world
    else:
        expected = topology.ffn_world(vllm_config.device_config.device_type)
        if parallel.enable_expert_parallel != topology.expert_parallel:
            raise ConfigRefused(
                f"enable_expert_parallel is {parallel.enable_expert_parallel} in vLLM's configuration "
                "of the FFN but "
                f"expert_parallel is {topology.expert_parallel} in AFD's; set it by --ffn-ep alone."
            )
    names = ("data_parallel_size", "tensor_parallel_size")
    seen = (parallel.data_parallel_size, parallel.tensor_parallel_size)
    for name, short, got, wanted in zip(names, ("dp", "tp"), seen, expected, strict=True):
        if got != wanted:
            raise ConfigRefused(
                f"{name} is {got} in vLLM's configuration of the {role} role but the AFD topology "
                f"{topology.name} needs {wanted} there; set it by --{role}-{short} alone."
            )


def _check_worker_class(vllm_config: VllmConfig, afd: AFDConfig) -> None:
    worker, device = vllm_config.parallel_config.worker_cls, vllm_config.device_config.device_type
    other = {path for (role, _), path in WORKER_CLASSES.items() if role is not afd.role}
    if worker == "auto" or worker.startswith("vllm.") or worker in other:
        wanted = WORKER_CLASSES.get((afd.role, device), f"an AFD {afd.role.value} worker")
        raise ConfigRefused(
            f"worker_cls is {worker!r}, but the {afd.role.value} role needs {wanted}; set --worker-cls to it."
        )
