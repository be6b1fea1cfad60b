# SPDX-License-Identifier: Apache-2.0
"""The attention role, as mixins in front of native worker and runner classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from afd_plugin.config import Role
from afd_plugin.connectors.base import ConnectorShape
from afd_plugin.connectors.registry import create_connector
from afd_plugin.control import AttentionControl, Membership
from afd_plugin.errors import EngineGone
from afd_plugin.model.build import AttentionBuild
from afd_plugin.model.remote_runner import RemoteMoERunner
from afd_plugin.model.scan import BoundUnit
from afd_plugin.plan import RemoteUnit
from afd_plugin.v1.worker import role_report
from afd_plugin.v1.worker.announcer import StepAnnouncer
from afd_plugin.v1.worker.attention_link import AttentionLink
from afd_plugin.v1.worker.fingerprints import fingerprint
from afd_plugin.v1.worker.role_worker import RoleWorkerMixin

if TYPE_CHECKING:
    _RunnerBase = GPUModelRunner
else:
    _RunnerBase = object


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


class AttentionWorkerMixin(RoleWorkerMixin):
    """A native worker whose experts live in FFN processes."""

    role = Role.ATTENTION
    build_class = AttentionBuild
    runner_class: type[AttentionRunnerMixin]

    link: AttentionLink | None = None

    def init_device(self) -> None:
        """Native device set-up; then the native runner gives way to the role's own."""
        super().init_device()
        del self.model_runner
        self.model_runner = self.runner_class(self.vllm_config, self.own_device)

    def _rendezvous(self, units: tuple[RemoteUnit, ...]) -> Membership:
        control = AttentionControl()
        self.control = control
        control.on_failure(self.guard.failed)
        return control.connect(
            self.link_settings,
            self.afd_config.topology,
            self.member_index,
            fingerprint(self.vllm_config, self.afd_config, units),
        )

    def _connect(self) -> None:
        control = self.control
        if isinstance(control, AttentionControl):
            topology, lane = self.afd_config.topology, self.member_index
            group = topology.group_of(lane)
            shape = self.connector_shape(topology.slot_of(lane))
            if self.own_device.type != "cpu":
                shape = dataclasses.replace(shape, router_dtypes=router_dtypes(self.units, shape))
            self.connector = create_connector(self.afd_config.connector, shape, self.link_settings)
            control.ready()
            membership = control.wait_ready()
            self.connector.connect(membership.group(group).data)
        link = AttentionLink(
            self.member_index,
            self.units,
            get_tp_group(),
            control if isinstance(control, AttentionControl) else None,
            self.connector,
            self.afd_config.topology.attention_dp,
            self._fail,
        )
        self.link = link
        self.model_runner.announce_steps(link)  # type: ignore[attr-defined]  # init_device made it a role's runner
        self._write_report()

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Native profiling here, and the same order to the FFN: it is reachable only in band."""
        super().profile(is_start, profile_prefix)
        if isinstance(self.control, AttentionControl):
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
        role_report.write(f"attention-{self.member_index}-{self.member_rank}", self.afd_status())

    def shutdown(self) -> None:
        """End the service in band: the FFN stops because attention says so."""
        if self.link is not None:
            self._write_report()
            self.link = None
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
