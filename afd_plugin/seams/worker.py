# SPDX-License-Identifier: Apache-2.0
"""Workers, their groups and their outputs."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="worker-cls",
        symbol="vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",
        kind=SeamKind.ENTRY_POINT,
        signature=(
            "@instrument(span_name='Worker init') def init_worker(self, all_kwargs: list[dict[str, "
            "Any]]) -> None"
        ),
        sha256="15c82606bcf7a2b5d51d73fb54c5eec0cef3f6f981700d9f084a5bc087b1ff3b",
        invariant=(
            "`worker_cls` given as a string is imported in the worker's own process, after general "
            "plugins are loaded."
        ),
        plan="stays: a documented extension point",
        used_by=(),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker",
        symbol="vllm.v1.worker.gpu_worker:Worker",
        kind=SeamKind.SUBCLASS,
        signature="class Worker(WorkerBase)",
        sha256="07d9301c6d56a2bbcff0d9d3db0ab3d24468fa0edaae917deca540942845830f",
        invariant=(
            "Life cycle: `init_device`, `load_model`, steps, `shutdown`; each may be extended "
            "through `super()`."
        ),
        plan="propose upstream: a worker attribute that names the runner class",
        used_by=(
            "afd_plugin.v1.worker.attention_worker",
            "afd_plugin.v1.worker.ffn_worker",
            "afd_plugin.v1.worker.role_worker",
        ),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-init",
        symbol="vllm.v1.worker.gpu_worker:Worker.__init__",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def __init__(self, vllm_config: VllmConfig, local_rank: int, rank: int, "
            "distributed_init_method: str, is_driver_worker: bool=False)"
        ),
        sha256="6ad3a3fddca7c124961b07084f7309c7672fcd8ecf3fbe203c756481dea8b429",
        invariant="Takes the configuration first and touches no device.",
        plan="propose upstream: a worker attribute that names the runner class",
        used_by=("afd_plugin.v1.worker.role_worker",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-init-device",
        symbol="vllm.v1.worker.gpu_worker:Worker.init_device",
        kind=SeamKind.OVERRIDE,
        signature="@instrument(span_name='Init device') def init_device(self)",
        sha256="a6e994971acb4f8e3df633a37f174965997cbcfb7783d118bf1ec09857a45553",
        invariant="Builds `model_runner` last, from the configuration and the device alone.",
        plan="propose upstream: a worker attribute that names the runner class",
        used_by=(
            "afd_plugin.v1.worker.attention_role",
            "afd_plugin.v1.worker.attention_worker",
            "afd_plugin.v1.worker.ffn_role",
        ),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-load-model",
        symbol="vllm.v1.worker.gpu_worker:Worker.load_model",
        kind=SeamKind.OVERRIDE,
        signature="def load_model(self, *, load_dummy_weights: bool=False) -> None",
        sha256="a6c23a22b9e596b08f791723e956adbcacca3ba494e88b717d08d5498e12652f",
        invariant="Loads through the runner and does not return before the model is complete.",
        plan="propose upstream: a worker attribute that names the runner class",
        used_by=("afd_plugin.v1.worker.role_worker",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-model-runner",
        symbol="vllm.v1.worker.gpu_worker:Worker.model_runner",
        kind=SeamKind.STATE_WRITE,
        signature="self.model_runner: GPUModelRunner | self.model_runner",
        sha256="1ac51dcbc99d8939ec54198fcfd45c1fb543717cc35ade12789faa7c854dfc4e",
        invariant="No other object keeps a reference to the runner when `init_device` returns.",
        plan="propose upstream: a worker attribute that names the runner class",
        used_by=(
            "afd_plugin.v1.worker.attention_role",
            "afd_plugin.v1.worker.ffn_role",
        ),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-profile",
        symbol="vllm.v1.worker.gpu_worker:Worker.profile",
        kind=SeamKind.OVERRIDE,
        signature="def profile(self, is_start: bool=True, profile_prefix: str | None=None)",
        sha256="9da165ff70c380b3890efaf1e8385d8eb87b7d5f2c217448ebaf013c7a47421d",
        invariant="Starts and stops profiling of this process only.",
        plan="propose upstream: a per-step callback around the model call",
        used_by=(
            "afd_plugin.v1.worker.attention_role",
            "afd_plugin.v1.worker.ffn_role",
        ),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="gpu-worker-shutdown",
        symbol="vllm.v1.worker.gpu_worker:Worker.shutdown",
        kind=SeamKind.OVERRIDE,
        signature="def shutdown(self) -> None",
        sha256="52fc56e79e63f442eaa8ac2b59a9ad3ff2d644eab293435cc1a2deab1b126e87",
        invariant="Called once on a clean end, in the worker's main thread.",
        plan="stays: a subclass or an override of a documented method",
        used_by=(
            "afd_plugin.v1.worker.attention_role",
            "afd_plugin.v1.worker.ffn_role",
        ),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-worker",
        symbol="vllm.v1.worker.cpu_worker:CPUWorker",
        kind=SeamKind.SUBCLASS,
        signature="class CPUWorker(Worker)",
        sha256="d4b1f3a597b3d2b50703d85d854fae2b38016e7951cc45f48913260324060363",
        invariant="As the GPU worker, of which it is a subclass.",
        plan="propose upstream: a worker attribute that names the runner class",
        used_by=(
            "afd_plugin.v1.worker.cpu_attention_worker",
            "afd_plugin.v1.worker.cpu_ffn_worker",
        ),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-worker-init",
        symbol="vllm.v1.worker.cpu_worker:CPUWorker.__init__",
        kind=SeamKind.OVERRIDE,
        signature=(
            "def __init__(self, vllm_config: VllmConfig, local_rank: int, rank: int, "
            "distributed_init_method: str, is_driver_worker: bool=False)"
        ),
        sha256="38a0e540f78b69573b83fec35c7141c1f40992ebfb844990d17c3484aced1c56",
        invariant="Takes the configuration first; checks memory against the KV cache size it names.",
        plan="propose upstream: a worker attribute that names the runner class",
        used_by=("afd_plugin.v1.worker.role_worker",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-worker-init-device",
        symbol="vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        kind=SeamKind.OVERRIDE,
        signature="def init_device(self)",
        sha256="8130e180d45385fd30400927fe9cef3f8eefc67caebd80d943e1a34635813fdd",
        invariant="Builds `model_runner` last, from the configuration and the device alone.",
        plan="propose upstream: a worker attribute that names the runner class",
        used_by=(
            "afd_plugin.v1.worker.attention_role",
            "afd_plugin.v1.worker.ffn_role",
        ),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-worker-model-runner",
        symbol="vllm.v1.worker.cpu_worker:CPUWorker.model_runner",
        kind=SeamKind.STATE_WRITE,
        signature="self.model_runner: CPUModelRunner | self.model_runner",
        sha256="649b80e5416bd7050c04491996c5f0cee2fe748f9a72fe882172aee7e8f37e9f",
        invariant="No other object keeps a reference to the runner when `init_device` returns.",
        plan="propose upstream: a worker attribute that names the runner class",
        used_by=(
            "afd_plugin.v1.worker.attention_role",
            "afd_plugin.v1.worker.ffn_role",
        ),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="cpu-worker-profile",
        symbol="vllm.v1.worker.cpu_worker:CPUWorker.profile",
        kind=SeamKind.OVERRIDE,
        signature="def profile(self, is_start: bool=True, profile_prefix: str | None=None)",
        sha256="92019502dbf7763aa5dccd64756f24475e55fc07c92e443edcb28e1ab5993d01",
        invariant="Starts and stops profiling of this process only.",
        plan="propose upstream: a per-step callback around the model call",
        used_by=("afd_plugin.v1.worker.attention_role", "afd_plugin.v1.worker.ffn_role"),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="async-output",
        symbol="vllm.v1.outputs:AsyncModelRunnerOutput",
        kind=SeamKind.SUBCLASS,
        signature="class AsyncModelRunnerOutput(ABC)",
        sha256="cb2dc8288133bdaef15aa086155a87a2eb50147c8be896a00133fea15dd3f783",
        invariant="The engine calls `get_output` once, on its output thread, and nothing else.",
        plan="stays: a subclass or an override of a documented method",
        used_by=(
            "afd_plugin.v1.worker.attention_role",
            "afd_plugin.v1.worker.attention_worker",
        ),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="async-output-get-output",
        symbol="vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
        kind=SeamKind.OVERRIDE,
        signature="@abstractmethod def get_output(self) -> ModelRunnerOutput",
        sha256="8e7e9703d7803cffa3afebbd498f44b21647b1daf08d290ff42617c7eb4ffa05",
        invariant=(
            "Returns after the step's tokens have reached the host; an exception in it fails the engine."
        ),
        plan="stays: a subclass or an override of a documented method",
        used_by=("afd_plugin.v1.worker.attention_worker",),
        afd_tests=evidence.GPU,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="parallel-state",
        owner="vllm.distributed.parallel_state:",
        names={
            "GroupCoordinator": "d563486acc928371",
            "get_tp_group": "efb2bea26f3246f5",
            "graph_capture": "edb21a7a4343360b",
        },
        invariant=(
            "The tensor-parallel group of this role's own world, and the context for capturing with "
            "its communicators."
        ),
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="group-coordinator",
        owner="vllm.distributed.parallel_state:GroupCoordinator",
        names={
            "broadcast": "dba785073e3a9b2b",
            "broadcast_object": "ca22b09e0f7f5fdd",
            "rank_in_group": "7bf504467fbc7fe9",
            "world_size": "d797bdcde1918446",
        },
        invariant="Broadcasts within the tensor-parallel group, and says which rank this process is.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="logger",
        owner="vllm.logger:",
        names={
            "init_logger": "935514d1c2637744",
        },
        invariant="vLLM's logger, so that lines of workers carry their process prefix.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="scheduler-output-classes",
        owner="vllm.v1.core.sched.output:",
        names={
            "GrammarOutput": "7d548d6c26bd5879",
            "SchedulerOutput": "38ae9d4a024232b0",
        },
        invariant="Classes in signatures of overridden methods.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="runner-output-class",
        owner="vllm.v1.outputs:",
        names={
            "ModelRunnerOutput": "3815870359a3691b",
        },
        invariant="The class of a step's output.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="worker-attributes",
        owner="vllm.v1.worker.worker_base:WorkerBase",
        names={
            "device": "6606afe3d22dfd07",
            "model_config": "eec3bb72c27973bf",
            "rank": "23f36712e30510f2",
            "scheduler_config": "885a759e95594e56",
            "vllm_config": "49ae69fa3714c1be",
        },
        invariant="Configuration, rank and device of a worker, set before `load_model`.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="version",
        owner="vllm.version:",
        names={
            "__version__": "7c8c35a4101b7ffc",
        },
        invariant="The exact version, also where the distribution has another name.",
        afd_tests=evidence.WORKER,
    ),
)
