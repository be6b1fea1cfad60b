# SPDX-License-Identifier: Apache-2.0
"""A short scheduler slice for the workers, so that a message wakes its receiver at once.

While a worker computes, vLLM's engine core polls shared memory in a loop. On a host with as many busy processes as
cores the receiver of an exchange is often woken on the core of that loop, and Linux lets the loop finish its slice of
some milliseconds first, several times the exchange itself. A thread that has asked for a shorter slice may cut in
(Linux 6.12 and later; earlier kernels accept the request and ignore it). It takes no more time from anybody than its
fair share, and needs no privilege.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from afd_plugin.errors import ConfigRefused

SLICE_US = 100
"""The shortest slice that Linux grants."""
SLICE_VARIABLE = "AFD_SLICE_US"
"""Overrides ``SLICE_US``; 0 leaves the scheduler's own."""

_SYSTEM_CALL = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
"""The kernel's ``struct sched_attr``: size, policy, flags, nice, priority, runtime, deadline, period, two clamps."""


def request_short_slice() -> bool:
    """Ask for a short slice for this thread and the threads it will start; whether the kernel took it.

    Raises:
        ConfigRefused: ``AFD_SLICE_US`` is not a number.
    """
    wanted = os.environ.get(SLICE_VARIABLE, str(SLICE_US))
    if not wanted.isdecimal():
        raise ConfigRefused(
            f"{SLICE_VARIABLE} is {wanted!r}; expected microseconds, or 0 for the system's own."
        )
    number = _SYSTEM_CALL.get(platform.machine())
    plain = os.sched_getscheduler(0) == os.SCHED_OTHER  # whoever chose another policy keeps it
    if int(wanted) == 0 or number is None or not plain:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, 1000 * int(wanted), 0, 0, 0, 0
    )
    return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(attributes), 0) == 0)
