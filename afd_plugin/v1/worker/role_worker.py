# SPDX-License-Identifier: Apache-2.0
"""What the workers of both roles share: configuration, role-scoped loading, the two planes.

A mixin in front of a native worker class. Native methods are extended through ``super()`` and never re-typed.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.tracing import instrument_manual
from vllm.v1.worker.gpu_worker import Worker

from afd_plugin import report
from afd_plugin.config import CONFIG_KEY, AFDConfig, LinkSettings, Role
from afd_plugin.connectors.base import AFDConnector, ConnectorShape
from afd_plugin.control import Membership
from afd_plugin.control.link import Control
from afd_plugin.errors import AFDError, AskedToEnd, ConfigRefused, EngineGone, PeerAborted
from afd_plugin.model.build import RoleBuild
from afd_plugin.model.loader import RoleLoading, register_loaders, role_load_format
from afd_plugin.model.scan import BoundUnit, find_units
from afd_plugin.observability.events import event
from afd_plugin.observability.metrics import Publisher, Reading, readings_of
from afd_plugin.plan import RemoteUnit
from afd_plugin.v1.refusals import check_vllm_config
from afd_plugin.v1.worker.failure_guard import FailureGuard
from afd_plugin.v1.worker.fingerprints import model_dtype
from afd_plugin.v1.worker.parent_watch import ParentWatch
from afd_plugin.v1.worker.scheduling import request_short_slice
from afd_plugin.v1.worker.step_tracing import StepTracing, step_tracing
from afd_plugin.v1.worker.termination import Termination

if TYPE_CHECKING:
    _Base = Worker
else:
    _Base = object

logger = init_logger(f"vllm.{__name__}")
"""Below vLLM's own logger, whose handlers and level it shares: others of ours show only warnings and errors."""


class RoleWorkerMixin(_Base):
    """Configuration and life cycle common to attention and FFN workers.

    ``afd_config`` and ``link_settings`` are read in the constructor; ``units`` are known once the model is built.
    """

    role: Role
    build_class: type[RoleBuild]

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self.afd_config = self._read_config(vllm_config)
        check_vllm_config(vllm_config, self.afd_config)
        self.link_settings = LinkSettings.from_env()
        request_short_slice()
        super().__init__(vllm_config, *args, **kwargs)
        self.units: tuple[BoundUnit, ...] = ()
        self.control: Control | None = None
        self.connector: AFDConnector | None = None
        self.membership: Membership | None = None
        self.publisher: Publisher | None = None
        self.parent_watch: ParentWatch | None = None
        self.termination = Termination()
        self.guard = FailureGuard(self._abort_data_plane)
        self.loading = RoleLoading(self.build_class(self.afd_config), self._before_weights)

    @classmethod
    def _read_config(cls, vllm_config: VllmConfig) -> AFDConfig:
        additional = vllm_config.additional_config
        raw = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
        if raw is None:
            raise ConfigRefused(
                f"{cls.__name__} was started without additional_config['{CONFIG_KEY}']; pass "
                f'--additional-config \'{{"{CONFIG_KEY}": {{"role": "{cls.role.value}"}}}}\' or use '
                f"`afd {cls.role.value}`."
            )
        config = AFDConfig.parse(raw)
        if config.role is not cls.role:
            raise ConfigRefused(
                f"afd.role is {config.role.value!r} but --worker-cls names the {cls.role.value} worker {cls.__name__}."
            )
        return config

    @property
    def is_leader(self) -> bool:
        """Whether this rank talks to the other role: the first one of its lane or group."""
        return self.member_rank == 0

    @property
    def own_device(self) -> torch.device:
        """The device that ``init_device`` chose; RuntimeError before it ran."""
        if self.device is None:
            raise RuntimeError("the worker's device is asked for before init_device has chosen it")
        return self.device

    @property
    def member_index(self) -> int:
        """The lane, group or shard of this process."""
        if self.afd_config.members > 1:
            return self.afd_config.member
        return self._world_rank // self._member_ranks

    @property
    def member_rank(self) -> int:
        """The rank of this process within its lane or group."""
        return self._world_rank % self._member_ranks

    @property
    def rank_name(self) -> str:
        """This worker in metrics, events and spans."""
        return f"{self.member_index}-{get_tp_group().rank_in_group}"

    @property
    def _member_ranks(self) -> int:
        topology = self.afd_config.topology
        return topology.attention_tp if self.role is Role.ATTENTION else topology.ffn_tp

    @property
    def _world_rank(self) -> int:
        tensor_parallel = get_tp_group()
        data_parallel_rank = self.vllm_config.parallel_config.data_parallel_rank
        return data_parallel_rank * tensor_parallel.world_size + tensor_parallel.rank_in_group

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Build and load this role's half natively, then connect the roles."""
        self.parent_watch = ParentWatch(self._parent_died)
        try:
            self.termination.check()
            register_loaders()
            load_config = self.vllm_config.load_config
            load_config.load_format = role_load_format(str(load_config.load_format))
            report.phase("building")
            with self.loading.active():
                super().load_model(load_dummy_weights=load_dummy_weights)
            self.termination.check()
            report.phase("connecting")
            began = time.time_ns()
            self._connect()
            self._span("AFD connect", began)
            self.termination.check()
            report.phase("connected")
            self.publisher = Publisher(self.role.value, self.rank_name, self._readings)
            epoch = self.membership.epoch if self.membership is not None else None
            logger.info(
                event(
                    "connected", role=self.role.value, rank=self.rank_name, epoch=epoch, units=len(self.units)
                )
            )
        except BaseException as error:
            self._fail(error)
            raise

    def _before_weights(self, model: nn.Module) -> None:
        """Between construction and reading: scan the model, then shake hands, on every rank of the lane or group."""
        num_experts = self.model_config.get_num_experts()
        self.units = find_units(model, self.afd_config, num_experts)
        refusal: AFDError | None = None
        began = time.time_ns()
        if self.is_leader:
            try:
                self.membership = self._rendezvous(tuple(bound.unit for bound in self.units))
            except AFDError as error:
                refusal = error
        if get_tp_group().world_size > 1:
            refusal = get_tp_group().broadcast_object(refusal, 0)  # followers raise it, too
        if refusal is not None:
            raise refusal
        self._span("AFD handshake", began)
        report.phase("loading weights")

    def _span(self, name: str, began: int) -> None:
        """A part of the start that ends now, among vLLM's own spans of it; nothing where nothing is traced."""
        attributes = {"afd.role": self.role.value, "afd.rank": self.rank_name, "afd.units": len(self.units)}
        if self.membership is not None:
            attributes["afd.epoch"] = f"{self.membership.epoch:x}"
        instrument_manual(name, began, time.time_ns(), attributes)

    def _step_tracing(self) -> StepTracing | None:
        """The spans of this worker's steps: in a traced service, on the rank that talks to the other role."""
        if self.membership is None:
            return None
        independent = self.afd_config.topology.independent_lanes
        first = self.role is Role.ATTENTION and (independent or self.member_index == 0)
        return step_tracing(
            self.role.value, self.rank_name, self._epoch, first=first, independent=independent
        )

    def _epoch(self) -> int:
        return self.membership.epoch if self.membership is not None else 0

    def _rendezvous(self, units: tuple[RemoteUnit, ...]) -> Membership:
        """Meet the peers and compare fingerprints; leaders only."""
        raise NotImplementedError

    def _connect(self) -> None:
        """Join the data plane once every role has loaded its weights."""
        raise NotImplementedError

    def connector_shape(self, lane: int | None) -> ConnectorShape:
        """What sizes this end's connector; ``lane`` is the index within the group, None on the FFN."""
        return ConnectorShape(
            lanes=self.afd_config.topology.lanes_per_group,
            lane=lane,
            max_tokens=self.scheduler_config.max_num_batched_tokens,
            hidden_size=self.model_config.get_hidden_size(),
            dtype=model_dtype(self.vllm_config),
            device=self.own_device,
            units=tuple(bound.unit for bound in self.units),
            stages=self.afd_config.microbatches,
        )

    def _counts(self) -> Mapping[str, object]:
        """The plain counters of this worker's part in the steps; read from another thread."""
        raise NotImplementedError

    def _readings(self) -> Iterable[Reading]:
        """What the metrics thread publishes."""
        yield from readings_of(self._counts())
        if self.connector is not None:
            yield from readings_of(vars(self.connector.counts))
        if self.control is not None:
            statistics = self.control.statistics
            yield from readings_of(
                {
                    "strangers": statistics.strangers,
                    "dropped": dict(statistics.dropped),
                    "refused": dict(statistics.refused),
                }
            )
            for peer, age in dict(statistics.last_seen_age_s).items():
                yield Reading("afd:peer_up", float(not self.control.failed), (peer,))
                yield Reading("afd:peer_seen_seconds", age, (peer,))

    def _parent_died(self, pid: int) -> None:
        error = EngineGone(f"Process {pid}, which had started this worker, has died.")
        self._fail(error)
        self.guard.failed(error)

    def _abort_data_plane(self) -> None:
        if self.connector is not None:
            self.connector.abort()

    def _fail(self, error: BaseException) -> None:
        """Tell the launcher and the peers why this worker ends."""
        if isinstance(error, SystemExit):
            if self.control is not None:
                self.control.abort(
                    AskedToEnd("it was asked to end (SIGTERM) while its peers still needed it")
                )
            return
        report.failure(error)
        name = error.name if isinstance(error, AFDError) else type(error).__name__
        epoch = self.membership.epoch if self.membership is not None else None
        logger.error(event("failed", role=self.role.value, epoch=epoch, step=self._step(), error=name))
        if self.control is not None and not isinstance(error, PeerAborted):
            self.control.abort(error, traceback_tail(error))

    def _step(self) -> int | None:
        """The step that runs, or ran last; None before the first."""
        return None

    def _close_planes(self) -> None:
        self.guard.disarm()
        if self.parent_watch is not None:
            self.parent_watch.close()
            self.parent_watch = None
        if self.publisher is not None:
            self.publisher.stop()
            self.publisher = None
        if self.connector is not None:
            self.connector.close()
            self.connector = None
        if self.control is not None:
            self.control.close()
            self.control = None

    def _load_report(self) -> dict[str, object]:
        held, read = self.loading.held, self.loading.read
        return {
            "role": self.role.value,
            "rank": self.rank,
            "topology": self.afd_config.topology.name,
            "units": [bound.unit.name for bound in self.units],
            "weight_bytes": held.total if held else 0,
            "expert_bytes": held.routed_experts + held.shared_experts if held else 0,
            "gate_bytes": held.gate if held else 0,
            "other_bytes": held.other if held else 0,
            "bytes_read": read.bytes,
            "tensors_skipped": read.skipped,
            "tensors_read": {file: len(names) for file, names in read.tensors.items()},
            "tensor_names": read.tensors,
            "exchanges_per_step": len(self.units),
        }


def traceback_tail(error: BaseException, lines: int = 12) -> Sequence[str]:
    """The last lines of ``error``'s traceback, for the peer's message."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return text.splitlines()[-lines:]
