# SPDX-License-Identifier: Apache-2.0
"""The FFN role, as a mixin in front of native worker classes."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Mapping
from types import ModuleType

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from afd_plugin.config import Role
from afd_plugin.connectors.registry import create_connector
from afd_plugin.control import FFNControl, Membership
from afd_plugin.model.build import FFNBuild
from afd_plugin.model.scan import tensor_bytes
from afd_plugin.plan import RemoteUnit
from afd_plugin.v1.worker import role_report
from afd_plugin.v1.worker.ffn_model_runner import FFNModelRunner
from afd_plugin.v1.worker.ffn_service import FFNService
from afd_plugin.v1.worker.fingerprints import fingerprint
from afd_plugin.v1.worker.ranges import RANGES
from afd_plugin.v1.worker.role_worker import RoleWorkerMixin
from afd_plugin.v1.worker.verdict import verdict

logger = init_logger(__name__)


class FFNWorkerMixin(RoleWorkerMixin):
    """A native worker that holds experts and serves them inside one RPC, ``afd_serve``.

    It has no KV cache, no scheduler and no sampler: its host never asks for them.
    """

    role = Role.FFN
    build_class = FFNBuild
    runner_class: type[FFNModelRunner]
    service_class: type[FFNService] = FFNService

    service: FFNService | None = None
    native_runner_bytes: tuple[int, int] = (0, 0)
    """Tensor bytes of the native runner that ``init_device`` builds: while it lived, and what is left of it."""

    def init_device(self) -> None:
        """Native device set-up; the request-facing runner it builds is dropped before any weight is read."""
        super().init_device()
        held = reachable_tensor_bytes(self.model_runner)
        gone = weakref.ref(self.model_runner)
        del self.model_runner
        gc.collect()
        survivor = gone()
        self.native_runner_bytes = (held, reachable_tensor_bytes(survivor) if survivor is not None else 0)
        runner = self.runner_class(self.vllm_config, self.own_device)
        self.model_runner = runner  # type: ignore[assignment]  # all of a runner that the FFN's host calls

    def _rendezvous(self, units: tuple[RemoteUnit, ...]) -> Membership:
        control = FFNControl()
        self.control = control
        control.on_failure(self.guard.failed)
        self.connector = create_connector(
            self.afd_config.connector, self.connector_shape(None), self.link_settings
        )
        settings = self.link_settings
        alone = self.vllm_config.parallel_config.data_parallel_size == 1
        if alone and self.member_index and not settings.peer:
            settings = settings.beside()
        return control.listen(
            settings,
            self.afd_config.topology,
            self.member_index,
            fingerprint(self.vllm_config, self.afd_config, units),
            self.connector.offer(),
        )

    def _connect(self) -> None:
        self._forget_attention_layers()
        control = self.control if isinstance(self.control, FFNControl) else None
        self.service = self.service_class(
            self.vllm_config,
            self.afd_config.topology,
            self.member_index,
            self.units,
            get_tp_group(),
            control,
            self.connector,
            self.profile,
        )
        self.service.prepare()
        if control is not None and self.connector is not None:
            control.ready()
            membership = control.wait_ready()
            self.connector.connect(membership.group(self.member_index).data)
        self.service.tracing = self._step_tracing()
        self.service.check_asked = self.termination.check
        self._write_report()

    def _forget_attention_layers(self) -> None:
        """Attention layers enter vLLM's static forward context in their constructors; they are not here any more."""
        context = self.vllm_config.compilation_config.static_forward_context
        for name in [name for name, layer in context.items() if not isinstance(layer, MoERunner)]:
            del context[name]

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Native profiling, by the attention role's order; the trace is named after the FFN."""
        RANGES.profiling(is_start)
        super().profile(is_start, f"ffn-{profile_prefix}" if profile_prefix else "ffn")

    def afd_serve(self) -> dict[str, object]:
        """Serve until attention shuts the service down; an RPC of the FFN host. Returns :meth:`afd_status`."""
        if self.service is None:
            raise RuntimeError("the FFN worker is not connected")
        try:
            self.service.serve()
        except BaseException as error:
            cause = verdict(self.control, error)
            self._fail(cause)
            if cause is error:
                raise
            raise cause from error
        self._write_report()
        return self.afd_status()

    def afd_status(self) -> dict[str, object]:
        """What this worker holds and did; an RPC before and after ``afd_serve``."""
        status = self._load_report()
        status["native_runner_bytes"] = self.native_runner_bytes
        if self.service is not None:
            status.update(dataclasses.asdict(self.service.counts))
        if self.connector is not None:
            status.update(dataclasses.asdict(self.connector.counts))
            status["device_steps"] = dataclasses.asdict(self.connector.device_steps())
        return status

    def _counts(self) -> Mapping[str, object]:
        return vars(self.service.counts) if self.service is not None else {}

    def _step(self) -> int | None:
        return self.service.last_step if self.service is not None else None

    def _write_report(self) -> None:
        times = {} if self.service is None else {"recent_compute_s": list(self.service.recent_compute_s)}
        role_report.write(f"ffn-{self.member_index}-{self.member_rank}", {**self.afd_status(), **times})

    def shutdown(self) -> None:
        self.service = None
        self._close_planes()
        super().shutdown()


def reachable_tensor_bytes(root: object) -> int:
    """Bytes of tensors reachable from ``root`` through containers and instance attributes; not through code."""
    seen: set[int] = set()
    tensors: list[torch.Tensor] = []
    queue: list[object] = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, str, bytes)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, dict):
            queue += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            queue += item
        else:
            # lint: allow probing: objects of any kind are walked, and some have no attributes of their own
            queue += vars(item).values() if hasattr(item, "__dict__") and not callable(item) else ()
    return tensor_bytes(tensors)
