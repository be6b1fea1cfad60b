# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM's executor into a worker whose errors the attention role tells its peers."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="gpu-worker-execute-model",
        symbol="vllm.v1.worker.gpu_worker:Worker.execute_model",
        kind=SeamKind.OVERRIDE,
        signature=(
            "@torch.inference_mode() @with_gpu_sync_check def execute_model(self, "
            "scheduler_output: 'SchedulerOutput') -> ModelRunnerOutput | AsyncModelRunnerOutput | None"
        ),
        sha256="6ec4c24a63ce06190afdd019faa62d24ce34c8e071c41b1f5a9c85b0eda957a9",
        invariant="Returns a finished output, an asynchronous one, or None when `sample_tokens` follows.",
        plan="propose upstream: a callback for what ends an engine's worker",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-sample-tokens",
        symbol="vllm.v1.worker.gpu_worker:Worker.sample_tokens",
        kind=SeamKind.OVERRIDE,
        signature=(
            "@torch.inference_mode() @with_gpu_sync_check def sample_tokens(self, "
            "grammar_output: 'GrammarOutput | None') -> ModelRunnerOutput | AsyncModelRunnerOutput"
        ),
        sha256="1e8dcfcec5dcd0a44099d0d406fc4a3fc1928def51f728b40b7021f339f33f0e",
        invariant="Returns the output of the step that `execute_model` left open.",
        plan="propose upstream: a callback for what ends an engine's worker",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-execute-dummy-batch",
        symbol="vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch",
        kind=SeamKind.OVERRIDE,
        signature="def execute_dummy_batch(self) -> None",
        sha256="e9666d287ea2eccb3c3f4f35d05f1decbd1149c228db73be72993f95f14deae1",
        invariant="The step of a data-parallel rank without requests.",
        plan="propose upstream: a callback for what ends an engine's worker",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-initialize-from-config",
        symbol="vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
        kind=SeamKind.OVERRIDE,
        signature=(
            "@instrument(span_name='Allocate KV cache') def initialize_from_config(self, "
            "kv_cache_config: KVCacheConfig) -> None"
        ),
        sha256="e2016bef69bb5d230e774a556d16d11ab350f8238c8d24ab325d797acaa5e41a",
        invariant="Allocates the KV cache, after the model has been loaded.",
        plan="propose upstream: a callback for what ends an engine's worker",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-determine-available-memory",
        symbol="vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        kind=SeamKind.OVERRIDE,
        signature="@torch.inference_mode() def determine_available_memory(self) -> int",
        sha256="fa24653af43b64c6fece7eb61a92da128b14304a8e018a34d92ed583ea90cbf1",
        invariant="Runs the model once and measures memory, after the model has been loaded.",
        plan="propose upstream: a callback for what ends an engine's worker",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-compile-or-warm-up-model",
        symbol="vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        kind=SeamKind.OVERRIDE,
        signature=(
            "@instrument(span_name='Warmup (GPU)') def compile_or_warm_up_model(self) -> CompilationTimes"
        ),
        sha256="a92a0854788190b7235fcddc8b1da2bd14dcc09d2b8f509d648df0384467cff8",
        invariant="Warm-up and graph capture; returns their times.",
        plan="propose upstream: a callback for what ends an engine's worker",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-worker-determine-available-memory",
        symbol="vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory",
        kind=SeamKind.OVERRIDE,
        signature="def determine_available_memory(self) -> int",
        sha256="1476315682265ed3aa92ea0098aaf63757abc3c53081e0179c2573c42f709e50",
        invariant="Warms the model up, and names the KV cache's size.",
        plan="propose upstream: a callback for what ends an engine's worker",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-worker-compile-or-warm-up-model",
        symbol="vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        kind=SeamKind.OVERRIDE,
        signature="def compile_or_warm_up_model(self) -> CompilationTimes",
        sha256="69f296793ecd8a0a7dac5ae1d52dd9e6d9e95fed4533f8a1f4c459abe024c62c",
        invariant="What is left to warm up without a KV cache; returns its times.",
        plan="propose upstream: a callback for what ends an engine's worker",
        used_by=("afd_plugin.v1.worker.attention_role",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = ()
