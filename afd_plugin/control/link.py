# SPDX-License-Identifier: Apache-2.0
"""What both ends of the control plane share. The contract is in :mod:`afd_plugin.control`."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

import zmq

from afd_plugin.config import LinkSettings
from afd_plugin.control import messages as m
from afd_plugin.control.address import Address
from afd_plugin.control.membership import Membership
from afd_plugin.control.monitor import Monitor
from afd_plugin.control.neighbours import Neighbours
from afd_plugin.control.sockets import Channel, dial, received
from afd_plugin.control.statistics import Statistics
from afd_plugin.errors import (
    AddressRefused,
    AFDError,
    ConfigRefused,
    ControlClosed,
    RendezvousTimeout,
)

logger = logging.getLogger(__name__)

LINGER_MS = 500
_C = TypeVar("_C", bound="Control")


class Control:
    """What both ends share.

    The sockets belong to the thread that connected, or to the one that :meth:`hand_over` names; only :meth:`check`,
    :meth:`on_failure`, :meth:`abort` and the statistics may be used from others.
    As a context manager it aborts on an exception, then closes.
    """

    def __init__(self) -> None:
        self.statistics = Statistics()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._channels: list[Channel] = []
        self._monitor: Monitor | None = None
        self._membership: Membership | None = None
        self._poller = zmq.Poller()
        self._owner = 0
        self._settings = LinkSettings()
        self._callbacks: list[Callable[[AFDError], None]] = []
        self._closed = False

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.abort(error)
        self.close()

    @property
    def membership(self) -> Membership:
        """The directory and epoch of this life; :class:`ControlClosed` before the rendezvous."""
        if self._membership is None:
            raise ControlClosed("The control plane has not met its peers yet.")
        return self._membership

    def check(self) -> None:
        """Raise the failure that the monitor thread has recorded, if any; costs well under a microsecond."""
        if self._monitor is not None and self._monitor.failure is not None:
            raise self._monitor.failure

    @property
    def failed(self) -> bool:
        """Whether a failure is known; never raises."""
        return self._monitor is not None and self._monitor.failure is not None

    def on_failure(self, callback: Callable[[AFDError], None]) -> None:
        """Call ``callback`` once, from the monitor thread, on the first failure; at once if it is known.

        It may release what the main thread is blocked in, or end the process. It must not call :meth:`close`.
        """
        if self._monitor is None:
            self._callbacks.append(callback)
        else:
            self._monitor.on_failure(callback)

    def abort(self, error: BaseException | str, traceback_tail: Sequence[str] = ()) -> None:
        """Tell every member that this one has failed, with the error and the end of its traceback.

        Returns when the neighbours have confirmed it, after half a second at most. Does nothing before the
        rendezvous, after close(), or when a peer's failure is already known: everybody knows that one.
        """
        if self._monitor is None or self._closed or self._monitor.failure is not None:
            return
        name = error.name if isinstance(error, AFDError) else ""
        if isinstance(error, BaseException):
            if not traceback_tail and error.__traceback__ is not None:
                traceback_tail = "".join(traceback.format_exception(error)).splitlines()
            error = str(error) if name else f"{type(error).__name__}: {error}"
        self._monitor.abort(name, error, traceback_tail)

    @property
    def owner(self) -> int:
        """The thread that the sockets belong to."""
        return self._owner

    def hand_over(self, owner: int) -> None:
        """Give the sockets to the thread ``owner``; the last call of the thread that connected."""
        self._owner = owner

    def close(self) -> None:
        """Leave in good order and release threads, sockets and ports; idempotent, bounded by seconds."""
        if self._closed:
            return
        self._closed = True
        if self._monitor is not None:
            self._monitor.stop()
        for channel in self._channels:
            channel.close(LINGER_MS)
        if self._context is not None:
            self._context.term()

    # ------------------------------------------------------------------ for the two ends

    def _open(self, settings: LinkSettings) -> zmq.Context[zmq.Socket[bytes]]:
        if self._closed or self._context is not None:
            raise ControlClosed("A control plane is used once; make a new one for a new life.")
        self._settings = settings
        self._owner = threading.get_ident()
        self._context = zmq.Context()
        return self._context

    def _dial(self, address: Address) -> Channel:
        assert self._context is not None  # noqa: S101 - _open has run
        channel = dial(self._context, address, self._settings.token)
        self._channels.append(channel)
        return channel

    def _peer(self) -> Address:
        if not self._settings.peer:
            raise ConfigRefused(
                "AFD_PEER is not set; it must be the address of FFN group 0, which hosts the rendezvous."
            )
        address = Address.parse(self._settings.peer, "AFD_PEER")
        if address.port == 0:
            raise AddressRefused(f"AFD_PEER is {self._settings.peer!r}; port 0 cannot be dialled.")
        self._require_token(address, "AFD_PEER")
        return address

    def _require_token(self, address: Address, knob: str) -> None:
        if not self._settings.token and not address.is_loopback:
            raise ConfigRefused(
                f"{knob} is {address}, which other machines may reach, but AFD_TOKEN is empty; "
                "give both roles the same random token."
            )

    def _start_monitor(self, me: m.MemberId, neighbours: Neighbours) -> Monitor:
        assert self._context is not None  # noqa: S101 - _open has run
        monitor = Monitor(
            self._context, me, self.membership.epoch, self._settings, self.statistics, neighbours
        )
        self._monitor = monitor
        self._poller.register(monitor.wake, zmq.POLLIN)
        for callback in self._callbacks:
            monitor.on_failure(callback)
        monitor.start()
        return monitor

    def _live(self) -> Monitor:
        """The monitor, after the checks that every call on the owner's thread starts with."""
        monitor = self._monitor
        if monitor is None or self._closed:
            raise ControlClosed("The control plane is not connected, or is closed.")
        if monitor.failure is not None:
            raise monitor.failure
        if threading.get_ident() != self._owner:
            raise ControlClosed("The control plane's sockets belong to the thread that connected.")
        return monitor

    def _wait(self, timeout_s: float) -> None:
        """Sleep until a socket has something, the monitor calls, or ``timeout_s`` has passed."""
        monitor = self._live()
        self._poller.poll(max(0, round(timeout_s * 1000)))
        while received(monitor.wake) is not None:
            pass
        self.check()

    def _wait_go(self, channel: Channel, timeout_s: float | None) -> Membership:
        bound = self._settings.ready_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + bound
        while (remaining := deadline - time.monotonic()) > 0:
            self._live()
            while (frame := received(channel.socket)) is not None:
                message = m.decode(frame)
                if isinstance(message, m.Go) and message.epoch == self.membership.epoch:
                    self._poller.unregister(channel.socket)  # nothing more comes here but what is asked for
                    self._membership = self.membership.with_data(message.data)
                    return self._membership
                self.statistics.dropped["unexpected"] += 1
            self._wait(remaining)
        raise RendezvousTimeout(
            f"{self.membership.me} is ready, but the others were not within {bound:g} s (AFD_READY_TIMEOUT)."
        )

    def _names(self, members: Iterable[m.Member]) -> dict[m.MemberId, str]:
        return {
            member.id: f"{member.id} ({', '.join(filter(None, [member.process, member.address]))})"
            for member in members
        }


def process_name() -> str:
    """How this process is called in messages to people."""
    return f"pid {os.getpid()} on {platform.node() or 'unknown host'}"
