# SPDX-License-Identifier: Apache-2.0
import ctypes
import os
import platform
import struct
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from afd_plugin.errors import ConfigRefused
from afd_plugin.v1.worker.scheduling import SLICE_US, request_short_slice

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])


def current_slice_us() -> float:
    """The slice of this thread as the kernel reports it: the runtime of its ``struct sched_attr``."""
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    answer = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(number, 0, answer, len(answer), 0) == 0
    (nanoseconds,) = struct.unpack_from("=Q", answer, 24)
    return float(nanoseconds) / 1000


def in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch, value: str | None) -> tuple[bool, float, float]:
    """What the request answered, the slice before it, and the slice of a thread started afterwards."""
    if value is not None:
        monkeypatch.setenv("AFD_SLICE_US", value)

    def ask() -> tuple[bool, float, float]:
        before = current_slice_us()
        taken = request_short_slice()
        later: list[float] = []
        child = Thread(target=lambda: later.append(current_slice_us()))
        child.start()
        child.join()
        return taken, before, later[0]

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def test_threads_that_a_worker_starts_inherit_its_short_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, before, after = in_a_thread_of_its_own(monkeypatch, None)
    assert taken
    assert after == (SLICE_US if KERNEL >= (6, 12) else before)


def test_zero_leaves_the_slice_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, before, after = in_a_thread_of_its_own(monkeypatch, "0")
    assert not taken
    assert after == before


def test_a_process_with_a_policy_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda _pid: os.SCHED_BATCH)
    assert in_a_thread_of_its_own(monkeypatch, None)[0] is False


def test_what_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigRefused, match="AFD_SLICE_US is 'soon'"):
        in_a_thread_of_its_own(monkeypatch, "soon")
