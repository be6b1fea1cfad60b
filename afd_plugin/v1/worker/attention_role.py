# SPDX-License-Identifier: Apache-2.0
"""The attention role, as mixins in front of native worker and runner classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from afd_plugin.config import LinkSettings, Role
from afd_plugin.connectors.base import AFDConnector, ConnectorShape
from afd_plugin.connectors.registry import create_connector
from afd_plugin.connectors.sharded import ShardedConnector, of_shard
from afd_plugin.control import AttentionControl, Membership
from afd_plugin.errors import AFDError, EngineGone
from afd_plugin.model.build import AttentionBuild
from afd_plugin.model.remote_runner import RemoteMoERunner
from afd_plugin.model.scan import BoundUnit
from afd_plugin.observability.events import event
from afd_plugin.plan import RemoteUnit
from afd_plugin.v1.worker import role_report
from afd_plugin.v1.worker.announcer import StepAnnouncer
from afd_plugin.v1.worker.attention_link import AttentionLink
from afd_plugin.v1.worker.fingerprints import fingerprint
from afd_plugin.v1.worker.ranges import RANGES
from afd_plugin.v1.worker.recovery import Planes, Recovery
from afd_plugin.v1.worker.rejoin import Rejoining
from afd_plugin.v1.worker.resumable_link import ResumableLink, check_resumable
from afd_plugin.v1.worker.resume import Progress
from afd_plugin.v1.worker.role_worker import RoleWorkerMixin

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    StepOutput = ModelRunnerOutput | AsyncModelRunnerOutput | None
    _RunnerBase = GPUModelRunner
else:
    _RunnerBase = object

logger = init_logger(f"vllm.{__name__}")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_W = TypeVar("_W", bound="AttentionWorkerMixin")


class AttentionRunnerMixin(_RunnerBase):
    """A native runner whose model announces its steps."""

    def announce_steps(self, link: AttentionLink) -> None:
        """Put the announcer around whatever the native runner calls as its model."""
        self.model = StepAnnouncer(self.model, super().get_model(), link)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Native, and announced as serving no request: warm-up runs carry attention metadata like real ones."""
        if not isinstance(self.model, StepAnnouncer):
            return super()._dummy_run(*args, **kwargs)
        with self.model.without_requests():
            return super()._dummy_run(*args, **kwargs)

    def get_model(self) -> nn.Module:
        """The raw model, which is what vLLM's own ``get_model`` promises."""
        return self.model.unwrap() if isinstance(self.model, StepAnnouncer) else super().get_model()


def told(call: Callable[Concatenate[_W, _P], _R]) -> Callable[Concatenate[_W, _P], _R]:
    """What a call of vLLM's executor raises is told to the launcher and the peers before the executor hears of it.

    vLLM ends an engine whose worker raised by the same ``shutdown`` as one that was asked to stop, so that without
    this the FFN would be sent home in good order.
    """

    @wraps(call)
    def telling(self: _W, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(self, *args, **kwargs)
        except Exception as error:
            self._fail(error)
            raise

    return telling


class AttentionWorkerMixin(RoleWorkerMixin):
    """A native worker whose experts live in FFN processes."""

    role = Role.ATTENTION
    build_class = AttentionBuild
    runner_class: type[AttentionRunnerMixin]

    link: AttentionLink | None = None
    recovery: Recovery | None = None
    """On a lane's leader, where the FFN may be started again under it."""

    def init_device(self) -> None:
        """Native device set-up; then the native runner gives way to the role's own."""
        super().init_device()
        del self.model_runner
        self.model_runner = self.runner_class(self.vllm_config, self.own_device)

    def _rendezvous(self, units: tuple[RemoteUnit, ...]) -> Membership:
        control = AttentionControl()
        self.control = control
        control.on_failure(self._peer_failed)
        return control.connect(
            self.link_settings,
            self.afd_config.topology,
            self.member_index,
            fingerprint(self.vllm_config, self.afd_config, units),
        )

    def _connect(self) -> None:
        control = self.control
        if isinstance(control, AttentionControl):
            self.connector = self._make_connector(self.link_settings)
            if self.link_settings.ffn_restart_window_s:
                check_resumable(self.afd_config, self.connector)
            control.ready()
            self.membership = control.wait_ready()
            self.connector.connect(self._offers(self.membership))
        link = self._make_link()
        link.drain_timeout_s = self.link_settings.drain_timeout_s
        link.independent = self.afd_config.topology.independent_lanes
        link.tracing = self._step_tracing()
        self.link = link
        self.model_runner.announce_steps(link)  # type: ignore[attr-defined]  # init_device made it a role's runner
        self._write_report()

    def _make_connector(self, settings: LinkSettings) -> AFDConnector:
        shape = self.connector_shape(self.afd_config.topology.slot_of(self.member_index))
        if self.own_device.type != "cpu":
            shape = dataclasses.replace(shape, router_dtypes=router_dtypes(self.units, shape))
        name, shards = self.afd_config.connector, self.afd_config.topology.ffn_shards
        if shards == 1:
            return create_connector(name, shape, settings)
        return ShardedConnector(partial(create_connector, name), shape, settings, shards)

    def _offers(self, membership: Membership) -> Mapping[str, str]:
        """How this lane's connector finds its FFN group, or all shards."""
        topology = self.afd_config.topology
        if topology.ffn_shards == 1:
            return membership.group(topology.group_of(self.member_index)).data
        found: dict[str, str] = {}
        for shard in range(topology.ffn_shards):
            found |= of_shard(shard, membership.group(shard).data)
        return found

    def _make_link(self) -> AttentionLink:
        control = self.control if isinstance(self.control, AttentionControl) else None
        topology, lane, settings = self.afd_config.topology, self.member_index, self.link_settings
        parts = (lane, self.units, get_tp_group(), control, self.connector, topology.attention_dp)
        if not settings.ffn_restart_window_s or control is None:
            return AttentionLink(*parts)
        assert self.connector is not None and self.membership is not None  # noqa: S101, PT018 - a leader has both
        own = fingerprint(self.vllm_config, self.afd_config, [bound.unit for bound in self.units])
        self.recovery = Recovery(
            Planes(control, self.connector, self.membership),
            Progress(lane, len(self.units)),
            Rejoining(settings, topology, lane, own, self._make_connector),
            settings.ffn_restart_window_s,
            settings.failure_timeout_s,
            self._new_planes,
            self.guard.failed,
        )
        return ResumableLink(self.recovery, *parts)

    def _peer_failed(self, error: AFDError) -> None:
        if self.recovery is None:
            self.guard.failed(error)
        else:
            self.recovery.failed(error)

    def _new_planes(self, planes: Planes) -> None:
        self.control, self.connector, self.membership = planes.control, planes.connector, planes.membership
        if self.link is not None:
            self.link.counts.reconnects += 1
        logger.info(
            event("reconnected", role=self.role.value, epoch=planes.membership.epoch, step=self._step())
        )

    @told
    def determine_available_memory(self) -> int:
        """Native."""
        return super().determine_available_memory()

    @told
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Native."""
        super().initialize_from_config(kv_cache_config)

    @told
    def compile_or_warm_up_model(self) -> Any:
        """Native."""
        return super().compile_or_warm_up_model()

    @told
    def execute_dummy_batch(self) -> None:
        """Native."""
        super().execute_dummy_batch()

    @told
    def execute_model(self, scheduler_output: SchedulerOutput) -> StepOutput:
        """Native; what it returns is checked."""
        return self._checked(super().execute_model(scheduler_output))

    @told
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput:  # type: ignore[override]
        """Native; what it returns is checked. None where the native runner has nothing to sample."""
        return self._checked(super().sample_tokens(grammar_output))

    def _checked(self, output: StepOutput) -> StepOutput:
        """``output``, unless something has failed that shows only at the end of its step; on a CPU nothing does."""
        return output

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Native profiling here, and the same order to the FFN: it is reachable only in band."""
        RANGES.profiling(is_start)
        super().profile(is_start, profile_prefix)
        if self.recovery is not None:
            with self.recovery.use() as planes:
                planes.control.profile(is_start, profile_prefix or "")
        elif isinstance(self.control, AttentionControl):
            self.control.profile(is_start, profile_prefix or "")

    def afd_status(self) -> dict[str, object]:
        """What this worker holds and did; an RPC."""
        status = self._load_report()
        if self.link is not None:
            status.update(dataclasses.asdict(self.link.counts))
        if self.connector is not None:
            status.update(dataclasses.asdict(self.connector.counts))
            status["device_steps"] = dataclasses.asdict(self.connector.device_steps())
        return status

    def _counts(self) -> Mapping[str, object]:
        return vars(self.link.counts) if self.link is not None else {}

    def _step(self) -> int | None:
        return self.link.last_step if self.link is not None else None

    def _write_report(self) -> None:
        times = {} if self.link is None else {"recent_exchange_s": list(self.link.recent_exchange_s)}
        name = f"attention-{self.member_index}-{self.member_rank}"
        role_report.write(name, {**self.afd_status(), **times})

    def shutdown(self) -> None:
        """End the service in band: the FFN stops because attention says so."""
        if self.link is not None:
            self._write_report()
            self.link = None
        if self.recovery is not None:
            self.recovery.close()
        if isinstance(self.control, AttentionControl):
            if self.parent_watch is not None and self.parent_watch.parent_died():
                self._fail(EngineGone("The engine core above this worker has died."))
            self.guard.disarm()
            self.control.shutdown()
        self._close_planes()
        super().shutdown()


def router_dtypes(units: Sequence[BoundUnit], shape: ConnectorShape) -> tuple[torch.dtype | None, ...]:
    """In which type each unit's router logits will be sent, by asking its gate about one row of zeros.

    A gate outside the runner (none of the qualified families has one) is taken to answer in float32; the connector
    refuses another type when it comes.
    """
    row = torch.zeros(1, shape.hidden_size, dtype=shape.dtype, device=shape.device)
    found: list[torch.dtype | None] = []
    with torch.inference_mode():
        for bound in units:
            if not bound.unit.router_logits:
                found.append(None)
            elif isinstance(bound.module, RemoteMoERunner) and bound.module.gate is not None:
                logits, _ = bound.module.gate(row)
                found.append(logits.dtype)
            else:
                found.append(torch.float32)
    return tuple(found)
