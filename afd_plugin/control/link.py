# SPDX-License-Identifier: Apache-2.0
"""The two ends of the control plane, as the workers use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeAlias, TypeVar, Union

from afd_plugin.config import LinkSettings
from afd_plugin.control.fingerprint import Fingerprint
from afd_plugin.control.membership import Membership
from afd_plugin.control.messages import Drain, Profile, Shutdown
from afd_plugin.control.statistics import Statistics
from afd_plugin.errors import AFDError
from afd_plugin.plan import StepPlan
from afd_plugin.topology import Topology

Event: TypeAlias = Union[StepPlan, Profile, Drain, Shutdown]  # noqa: UP007


class Control:
    """What both ends share. All methods but on_failure(), abort() and check() belong to the owning thread."""

    statistics: Statistics
    membership: Membership

    def ready(self, data: Mapping[str, str] | None = None) -> None: ...
    def wait_ready(self, timeout_s: float | None = None) -> Membership: ...
    def check(self) -> None: ...
    def on_failure(self, callback: Callable[[AFDError], None]) -> None: ...
    def abort(self, error: BaseException | str, traceback_tail: Sequence[str] = ()) -> None: ...
    def close(self) -> None: ...


class AttentionControl(Control):
    """The end of one attention lane's leader."""

    def connect(self, settings: LinkSettings, topology: Topology, lane: int, fingerprint: Fingerprint) -> Membership: ...
    def announce(self, plan: StepPlan) -> None: ...
    def profile(self, start: bool, prefix: str = "") -> None: ...
    def drain(self) -> None: ...
    def shutdown(self) -> None: ...


class FFNControl(Control):
    """The end of one FFN group's leader."""

    def listen(
        self,
        settings: LinkSettings,
        topology: Topology,
        group: int,
        fingerprint: Fingerprint,
        data: Mapping[str, str] | None = None,
    ) -> Membership: ...
    def next_event(self, timeout_s: float | None = None) -> Event | None: ...
