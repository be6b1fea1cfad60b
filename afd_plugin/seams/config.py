# SPDX-License-Identifier: Apache-2.0
"""Configuration objects: what is read of them, and the few fields that are set."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="enable-dbo",
        symbol="vllm.config.parallel:ParallelConfig.enable_dbo",
        kind=SeamKind.CONFIG_MUTATION,
        signature="enable_dbo: bool",
        sha256="0bb76cf6e392d8dcba89ed2523bf1a99ead86f65b93e3914890f516fbb8418e6",
        invariant=(
            "Read in the worker when workspace, MoE layers and the model's wrapper are made, after "
            "this process has validated its configuration."
        ),
        plan="propose upstream: a microbatching option without an all-to-all backend",
        used_by=("afd_plugin.v1.worker.microbatching",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="disable-cascade-attention",
        symbol="vllm.config.model:ModelConfig.disable_cascade_attn",
        kind=SeamKind.CONFIG_MUTATION,
        signature="disable_cascade_attn: bool",
        sha256="c6558c994f2e5fcfa7facf3e57560d6fbbb60e6580ccf516768806e66a26c9b7",
        invariant="Read for each batch; two stages have no common prefix to share.",
        plan="propose upstream: a microbatching option without an all-to-all backend",
        used_by=("afd_plugin.v1.worker.microbatching",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="load-format",
        symbol="vllm.config.load:LoadConfig.load_format",
        kind=SeamKind.CONFIG_MUTATION,
        signature="load_format: str | LoadFormats",
        sha256="aa589a8a9c0b68e53c1224c820a1f4f9a6f7f8c00e567c36fe5ae1be33fd7c89",
        invariant=(
            "Read when the loader is chosen, which is after the worker's `load_model` began; no hash "
            "holds it."
        ),
        plan="propose upstream: a loader named by class path",
        used_by=("afd_plugin.v1.worker.role_worker",),
        afd_tests=evidence.MODEL,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="cache-config",
        owner="vllm.config.cache:CacheConfig",
        names={
            "kv_offloading_size": "f0c9b420c88d3654",
            "kv_sharing_fast_prefill": "2aa32527cbd0bc0b",
        },
        invariant="Options that AFD refuses, as the user set them.",
        afd_tests=evidence.REFUSALS,
    ),
    Surface(
        id="compilation-config-names",
        owner="vllm.config.compilation:",
        names={
            "CUDAGraphMode": "5fe3f488ff56cc6d",
        },
        invariant="The enumeration of graph modes.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="graph-modes",
        owner="vllm.config.compilation:CUDAGraphMode",
        names={
            "FULL": "b0764ddbb7ac117e",
            "NONE": "7442757dbe278622",
        },
        invariant=(
            "`NONE` is eager and `FULL` is one graph of the whole model, also as the mode of one step."
        ),
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="compilation-config",
        owner="vllm.config.compilation:CompilationConfig",
        names={
            "cudagraph_capture_sizes": "4724039104760277",
            "cudagraph_mode": "d92f87e23f4f8fca",
            "pass_config": "1c816ad5fee45df8",
            "static_forward_context": "7f92ab30b0c1302f",
        },
        invariant=(
            "The effective graph mode and sizes once the configuration is complete, and the layers "
            "by name that ops look up."
        ),
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="pass-config",
        owner="vllm.config.compilation:PassConfig",
        names={
            "enable_sp": "ab5d30d8613399f3",
        },
        invariant="Options that AFD refuses, as the user set them.",
        afd_tests=evidence.REFUSALS,
    ),
    Surface(
        id="device-config",
        owner="vllm.config.device:DeviceConfig",
        names={
            "device_type": "221e304999b6ab79",
        },
        invariant="The kind of device this process was configured for.",
        afd_tests=evidence.REFUSALS,
    ),
    Surface(
        id="kernel-config",
        owner="vllm.config.kernel:KernelConfig",
        names={
            "moe_backend": "8c64dddebd08f4c4",
        },
        invariant="Options that AFD refuses, as the user set them.",
        afd_tests=evidence.REFUSALS,
    ),
    Surface(
        id="load-config-class",
        owner="vllm.config.load:",
        names={
            "LoadConfig": "867048551dc3914b",
        },
        invariant="The class of the load configuration, a dataclass that can be copied with changes.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="model-config-class",
        owner="vllm.config.model:",
        names={
            "ModelConfig": "7d748e54a6f74905",
        },
        invariant="The class of the model configuration.",
        afd_tests=evidence.MODEL,
    ),
    Surface(
        id="model-config",
        owner="vllm.config.model:ModelConfig",
        names={
            "architectures": "35917555604f14d8",
            "dtype": "d47422fa1bcabe4e",
            "enable_return_routed_experts": "bc3494ce3359947f",
            "enable_sleep_mode": "4142b333d9b5f128",
            "enforce_eager": "c31399b51daaea3b",
            "get_hidden_size": "1a79e78fe8dec69b",
            "get_num_experts": "45d576739845397e",
            "hf_config": "4dfcfac3236a2718",
            "is_diffusion": "523c7db4812c7b49",
            "is_moe": "4f50609264254a16",
            "is_quantized": "ce25b2f52291499c",
            "model": "ee8222cb64508734",
            "multimodal_config": "10889fe8ce7ffb6d",
            "quantization": "5366a4e97824ee11",
            "runner_type": "33d2815ba7fc8a24",
        },
        invariant="What the model is: sizes, type, architecture, and options that AFD refuses.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="multimodal-config",
        owner="vllm.config.multimodal:MultiModalConfig",
        names={
            "language_model_only": "6905159d97f3d2f6",
        },
        invariant="Whether a multimodal model serves text only.",
        afd_tests=evidence.REFUSALS,
    ),
    Surface(
        id="offload-config",
        owner="vllm.config.offload:OffloadConfig",
        names={
            "offload_backend": "183aaadbb4abafe5",
            "prefetch": "6498e1c07cec6168",
            "uva": "c13917c53d45e5ea",
        },
        invariant="Options that AFD refuses, as the user set them.",
        afd_tests=evidence.REFUSALS,
    ),
    Surface(
        id="offload-prefetch",
        owner="vllm.config.offload:PrefetchOffloadConfig",
        names={
            "offload_group_size": "fe683f9af4abd1a8",
        },
        invariant="Options that AFD refuses, as the user set them.",
        afd_tests=evidence.REFUSALS,
    ),
    Surface(
        id="offload-uva",
        owner="vllm.config.offload:UVAOffloadConfig",
        names={
            "cpu_offload_gb": "bf5a9bf1bb391b31",
        },
        invariant="Options that AFD refuses, as the user set them.",
        afd_tests=evidence.REFUSALS,
    ),
    Surface(
        id="parallel-config-class",
        owner="vllm.config.parallel:",
        names={
            "ParallelConfig": "72fa1e97f879ce4a",
        },
        invariant="The class of the parallel configuration.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="parallel-config",
        owner="vllm.config.parallel:ParallelConfig",
        names={
            "data_parallel_backend": "863a60d1329f725f",
            "data_parallel_external_lb": "06c7f052d5015080",
            "data_parallel_hybrid_lb": "40e58a170b63a0c9",
            "data_parallel_rank": "978cf509f8c2478e",
            "data_parallel_size": "adb29f1956621098",
            "decode_context_parallel_size": "2286468c814725c3",
            "distributed_executor_backend": "c5afda0d387cddfb",
            "enable_elastic_ep": "ef11f240278ec902",
            "enable_eplb": "b9a0ef0cc2cfccfe",
            "enable_expert_parallel": "40bdb142c891aac2",
            "enable_fault_tolerance": "379dee4000a648f3",
            "nnodes": "05f72c1db24edbdd",
            "pipeline_parallel_size": "b0d18f5345029bb4",
            "prefill_context_parallel_size": "1f35943a06b3a215",
            "tensor_parallel_size": "4e48bde28e217e01",
            "use_ray": "b32e4435b15da101",
            "use_ubatching": "b1882baff95d8fd1",
            "worker_cls": "a42dcf7232d329f9",
        },
        invariant="Sizes and ranks of this role, and options that AFD refuses.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="scheduler-config",
        owner="vllm.config.scheduler:SchedulerConfig",
        names={
            "max_num_batched_tokens": "a701920f682f9e7e",
        },
        invariant="The most tokens of one step on one rank.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="vllm-config-names",
        owner="vllm.config.vllm:",
        names={
            "VllmConfig": "4fbad3c3e16352c4",
            "set_current_vllm_config": "8a63dcd71a393a9d",
        },
        invariant="The configuration class, and the context in which layers find the current one.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="vllm-config",
        owner="vllm.config.vllm:VllmConfig",
        names={
            "additional_config": "14ad186622c3ed67",
            "cache_config": "8fa81783b814a1af",
            "compilation_config": "a1cbd6111a49f105",
            "device_config": "456bc5bc891d31f9",
            "ec_transfer_config": "4156178548977a09",
            "kernel_config": "d9d2b3668f1a3243",
            "kv_transfer_config": "9af54f6fc5c9365c",
            "load_config": "2c538aaf2daccc5b",
            "lora_config": "372f16dc3377fa1d",
            "model_config": "ae84c2f4c6d3511c",
            "offload_config": "f9d366c1caee6aa5",
            "parallel_config": "fbae3f4d77054c28",
            "scheduler_config": "13b851db1333dada",
            "speculative_config": "854535e507901602",
            "use_v2_model_runner": "ee0ae67282d17af2",
            "weight_transfer_config": "8140c30d92f3111d",
        },
        invariant=(
            "The parts of the configuration by name; `additional_config` is the plugin's own and is hashed."
        ),
        afd_tests=evidence.WORKER,
    ),
)
