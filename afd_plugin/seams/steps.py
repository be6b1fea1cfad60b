# SPDX-License-Identifier: Apache-2.0
"""Model runners, the forward pass, graphs and microbatches."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="gpu-runner",
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        kind=SeamKind.SUBCLASS,
        signature=(
            "class GPUModelRunner(LoRAModelRunnerMixin, KVConnectorModelRunnerMixin, "
            "ECConnectorModelRunnerMixin)"
        ),
        sha256="a8ae25b21b96095affdf7ad62b78d3ebe6ef92677c7266ea2bcaea265e2f7f2a",
        invariant="Every forward pass goes through the attribute `model`, called with keywords.",
        plan="propose upstream: a per-step callback around the model call",
        used_by=(
            "afd_plugin.v1.worker.attention_model_runner",
            "afd_plugin.v1.worker.attention_role",
        ),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-runner-model",
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner.model",
        kind=SeamKind.STATE_WRITE,
        signature="self.model",
        sha256="6c0368a74cbd0d6835a6441a689ec2777993db07cc015dcf1765f276bae64859",
        invariant=(
            "May be any callable that forwards attribute reads to the model; `get_model` finds the raw one."
        ),
        plan="propose upstream: a per-step callback around the model call",
        used_by=(
            "afd_plugin.v1.worker.attention_model_runner",
            "afd_plugin.v1.worker.attention_role",
        ),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-runner-get-model",
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
        kind=SeamKind.OVERRIDE,
        signature="def get_model(self) -> nn.Module",
        sha256="2547d86e8e92c397d667bfcd84dceaa33eb7f692f4998a7e677c935bbd5115f0",
        invariant="Promises the raw model below all wrappers.",
        plan="propose upstream: a per-step callback around the model call",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-runner-dummy-run",
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
        kind=SeamKind.OVERRIDE,
        signature=(
            "@torch.inference_mode() def _dummy_run(self, num_tokens: int, cudagraph_runtime_mode: "
            "CUDAGraphMode | None=None, force_attention: bool=False, uniform_decode: bool=False, "
            "allow_microbatching: bool=True, skip_eplb: bool=False, is_profile: bool=False, "
            "create_mixed_batch: bool=False, remove_lora: bool=True, is_graph_capturing: bool=False, "
            "num_active_loras: int=0, profile_seq_lens: int | None=None, randomize_inputs: "
            "bool=False) -> tuple[torch.Tensor, torch.Tensor]"
        ),
        sha256="ecf67136275895c588c9e7d7278dd1691b89594d8274d76661a2476636d32514",
        invariant="Every forward pass that serves no request is made by it.",
        plan="propose upstream: a per-step callback around the model call",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-runner",
        symbol="vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        kind=SeamKind.SUBCLASS,
        signature="class CPUModelRunner(GPUModelRunner)",
        sha256="770ce0142def584286e3475a3d083b1898ce9f46184fc7cd6d495484273f9ecc",
        invariant="Every forward pass goes through the attribute `model`, called with keywords.",
        plan="propose upstream: a per-step callback around the model call",
        used_by=("afd_plugin.v1.worker.cpu_attention_worker",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-runner-model",
        symbol="vllm.v1.worker.cpu_model_runner:CPUModelRunner.model",
        kind=SeamKind.STATE_WRITE,
        signature="self.model",
        sha256="99999e1d6a224b4eaae20d278f873575c97139405d53b612c2a0775ddc20eac5",
        invariant=(
            "May be any callable that forwards attribute reads to the model; `get_model` finds the raw one."
        ),
        plan="propose upstream: a per-step callback around the model call",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-runner-get-model",
        symbol="vllm.v1.worker.cpu_model_runner:CPUModelRunner.get_model",
        kind=SeamKind.OVERRIDE,
        signature="def get_model(self) -> nn.Module",
        sha256="eb41a7e84c671920ed4754e294af6e2ef0447d9549e07366330f5c4be325f4eb",
        invariant="Promises the raw model below all wrappers.",
        plan="propose upstream: a per-step callback around the model call",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="ubatch-wrapper",
        symbol="vllm.v1.worker.gpu_ubatch_wrapper:UBatchWrapper",
        kind=SeamKind.SUBCLASS,
        signature="class UBatchWrapper",
        sha256="3870703f6f85d1e25acfb15508216197979ee0701ece4333d9e0935f3ceb51b5",
        invariant=(
            "Runs the model in two threads that take turns, one per stage, and keeps one graph per "
            "token count."
        ),
        plan="propose upstream: microbatches without data parallelism",
        used_by=(
            "afd_plugin.v1.worker.announcer",
            "afd_plugin.v1.worker.attention_model_runner",
            "afd_plugin.v1.worker.microbatching",
        ),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="ubatch-wrapper-call",
        symbol="vllm.v1.worker.gpu_ubatch_wrapper:UBatchWrapper.__call__",
        kind=SeamKind.OVERRIDE,
        signature="def __call__(self, *args, **kwargs)",
        sha256="004fbffec2b4cdfc0495d9df7250a12f46c6c38fc5402bf1b44cbf3260eaa25a",
        invariant=(
            "Decides from the forward context alone whether to split, capture, replay or run "
            "eagerly; asserts data-parallel metadata when it splits."
        ),
        plan="propose upstream: microbatches without data parallelism",
        used_by=("afd_plugin.v1.worker.microbatching",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-runner-batch-execution",
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def _determine_batch_execution_and_padding(self, num_tokens: int, num_reqs: int, "
            "num_scheduled_tokens_np: np.ndarray, max_num_scheduled_tokens: int, use_cascade_attn: "
            "bool, allow_microbatching: bool=True, force_eager: bool=False, force_uniform_decode: "
            "bool | None=None, force_has_lora: bool | None=None, force_num_active_loras: int | "
            "None=None, num_encoder_reqs: int=0) -> tuple[CUDAGraphMode, BatchDescriptor, bool, "
            "torch.Tensor | None, CUDAGraphStat | None]"
        ),
        sha256="8f6dba8e2111ef5ddef2725f1684f79eb95b5457473783956d1bdca969158931",
        invariant=(
            "Called once per batch before the forward pass; the first four results decide mode, "
            "descriptor, split and padding; `allow_microbatching` vetoes a split."
        ),
        plan="propose upstream: microbatches without data parallelism",
        used_by=("afd_plugin.v1.worker.attention_model_runner",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-runner-initialize-kv-cache",
        symbol="vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, is_profiling: bool=False) -> None"
        ),
        sha256="521ddb8028ebd4002a1feda205f28032c4cae975d639686c73908c6ce96a2c1e",
        invariant=(
            "Makes the attention groups and their metadata builders, one set per stage, before any "
            "forward pass that uses them."
        ),
        plan="propose upstream: microbatches without data parallelism",
        used_by=("afd_plugin.v1.worker.attention_model_runner",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="builder-update-block-table",
        symbol="vllm.v1.attention.backend:AttentionMetadataBuilder.supports_update_block_table",
        kind=SeamKind.STATE_WRITE,
        signature="supports_update_block_table: bool",
        sha256="509f006cec4e76a564695c0e287349de3633169a7f64a57fcf03d63b38317f21",
        invariant=(
            "Where it is false, each builder makes its metadata in full and shares none with another group."
        ),
        plan="propose upstream: metadata reuse that knows about stages",
        used_by=("afd_plugin.v1.worker.microbatching",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="graph-pool-type",
        owner="torch.cuda:",
        names={
            "_POOL_HANDLE": "08df3d4946984742",
        },
        invariant="The type of a graph's memory pool, for the type checker only.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="cuda-graph-wrapper",
        owner="vllm.compilation.cuda_graph:",
        names={
            "CUDAGraphStat": "cf5f76bdbbfb4e81",
            "CUDAGraphWrapper": "85258acc871bf605",
        },
        invariant="The wrapper that captures or replays a full graph of the model.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="cuda-graph-entry",
        owner="vllm.compilation.cuda_graph:CUDAGraphEntry",
        names={
            "cudagraph": "4e4d640e54937567",
        },
        invariant="`cudagraph` is None until the descriptor has been captured.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="cuda-graph-entries",
        owner="vllm.compilation.cuda_graph:CUDAGraphWrapper",
        names={
            "concrete_cudagraph_entries": "a7bfa88f192053b8",
        },
        invariant="One entry per batch descriptor, made at its first call.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="forward-context-names",
        owner="vllm.forward_context:",
        names={
            "BatchDescriptor": "cc168c801e39a91e",
            "DPMetadata": "2c5a53e4cd9a2669",
            "ForwardContext": "270090d1262d6adb",
            "create_forward_context": "bc0a167a06205e64",
            "get_forward_context": "2512d011ff3ae0aa",
            "override_forward_context": "b863e7ad9702b03f",
        },
        invariant="The context of the current forward pass: made, entered and read.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="batch-descriptor",
        owner="vllm.forward_context:BatchDescriptor",
        names={
            "num_tokens": "bdf2881e67fabdb1",
        },
        invariant="The padded token count of the current batch, by which graphs are kept.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="dp-metadata",
        owner="vllm.forward_context:DPMetadata",
        names={
            "make": "a1f956093f108dee",
            "num_tokens_across_dp_cpu": "2bcd3f68af3757dd",
        },
        invariant="Token counts of all data-parallel ranks in the current step, on the CPU.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="forward-context",
        owner="vllm.forward_context:ForwardContext",
        names={
            "attn_metadata": "f5cc6a9bc69dfd37",
            "batch_descriptor": "30ed7fb82b18e6ec",
            "cudagraph_runtime_mode": "d1a851bd1044eca1",
            "dp_metadata": "f3427898496db154",
            "slot_mapping": "b8db7fe13f04c860",
            "ubatch_slices": "eabc1f37fb5d769d",
        },
        invariant="What the runner decided for the current forward pass.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="torch-utils",
        owner="vllm.utils.torch_utils:",
        names={
            "aux_stream": "02342bbca359f0ae",
            "current_stream": "5b99d2d7e1e79137",
        },
        invariant="The stream on which vLLM's kernels of this thread run, and the one beside it (none on a CPU).",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="gpu-runner-attributes",
        owner="vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        names={
            "_is_uniform_decode": "fde4f225c26794d0",
            "attn_groups": "d30cc151229364be",
            "parallel_config": "595be037bbe40d07",
            "uniform_decode_query_len": "d5fcc6547f8247b1",
        },
        invariant="What the runner knows of the batch at hand and of the shape of a decode batch.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="ubatch-graph",
        owner="vllm.v1.worker.gpu_ubatch_wrapper:CUDAGraphMetaData",
        names={
            "cudagraph": "57c9dfcdd6c4221f",
            "outputs": "f7914956f7e4deb7",
        },
        invariant="A captured graph of two stages and its outputs.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="ubatch-wrapper-attributes",
        owner="vllm.v1.worker.gpu_ubatch_wrapper:UBatchWrapper",
        names={
            "_capture_ubatches": "b961cb78dc778a6e",
            "_make_ubatch_metadata": "ee8afa34b6804dea",
            "_run_ubatches": "14ee34ef0195c586",
            "cudagraph_wrapper": "1e375546ba32f858",
            "cudagraphs": "07bab5619f2b4746",
            "device": "ce83a1e92dc4892a",
            "runnable": "2c1f8b88c60f3d25",
            "sm_control": "609a9eef16e50991",
            "vllm_config": "49ae69fa3714c1be",
        },
        invariant="Graphs by token count for two stages, and the wrapper for one.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="ubatch-thresholds",
        owner="vllm.v1.worker.ubatch_utils:",
        names={
            "check_ubatch_thresholds": "21097ccd5b3f3665",
            "is_last_ubatch_empty": "99b25ba0139cfdab",
        },
        invariant="vLLM's own rules for when a batch is worth splitting.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="ubatch-slice",
        owner="vllm.v1.worker.ubatch_utils:UBatchSlice",
        names={
            "num_tokens": "ddf418b76c03ca92",
        },
        invariant="The token count of one stage.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="ubatching",
        owner="vllm.v1.worker.ubatching:",
        names={
            "dbo_current_ubatch_id": "f0b33d12a688f5c6",
            "dbo_yield": "3768e745b9cd984a",
        },
        invariant="Which stage this thread runs, and giving way to the other.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="attention-group-class",
        owner="vllm.v1.worker.utils:",
        names={
            "AttentionGroup": "280aef09fc71c196",
        },
        invariant="The class of an attention group.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="attention-group",
        owner="vllm.v1.worker.utils:AttentionGroup",
        names={
            "metadata_builders": "b6e685978beda12a",
        },
        invariant="The metadata builders of a group, one per stage.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="workspace",
        owner="vllm.v1.worker.workspace:",
        names={
            "lock_workspace": "180a5ba4efdddc7d",
        },
        invariant="Locks the kernels' workspace at its largest size.",
        afd_tests=evidence.GPU,
    ),
)
