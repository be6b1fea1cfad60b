# SPDX-License-Identifier: Apache-2.0
"""Which processes belong to a child, which of them are stopped, and how to end them all.

A child is started as the leader of a session, so its processes are found two ways: by session, which
survives the death of any parent in between, and by descent, which finds a process that made a session of
its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

import psutil


def members_of(sessions: Iterable[int]) -> list[psutil.Process]:
    """All living processes (zombies excluded) of the sessions led by ``sessions``, and their descendants.

    A process that merely has the number of a leader that ended is not one of them: numbers come back.
    """
    leaders = set(sessions)
    parents: dict[int, int] = {}
    found: dict[int, psutil.Process] = {}
    candidates: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["ppid", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        candidates[process.pid] = process
        parents[process.pid] = process.info["ppid"] or 0
        if _session(process.pid) in leaders:
            found[process.pid] = process
    grown = True
    while grown:
        more = [pid for pid, parent in parents.items() if parent in found and pid not in found]
        found.update((pid, candidates[pid]) for pid in more)
        grown = bool(more)
    return list(found.values())


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # it ended between the listing and this call, or belongs to somebody else
        return -1


def stopped(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of ``processes`` that are stopped (SIGSTOP); one under a debugger counts as running."""
    result = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                result.append(process)
    return result


def describe(process: psutil.Process) -> str:
    """``pid (name)``, for messages."""
    try:
        return f"{process.pid} ({process.name()})"
    except psutil.Error:
        return str(process.pid)


def wait_gone(sessions: Iterable[int], timeout: float) -> bool:
    """Whether every process of ``sessions`` has ended within ``timeout`` seconds."""
    leaders = tuple(sessions)
    deadline = time.monotonic() + timeout
    while members_of(leaders):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


def end_all(sessions: Iterable[int], terminate: float) -> tuple[str, ...]:
    """End every process of ``sessions``; returns descriptions of those that needed SIGKILL.

    SIGTERM first, then up to ``terminate`` seconds, then SIGKILL until none is left (bounded: an
    unkillable process, stuck in the kernel, is reported as killed and left to it). Resource trackers are
    spared while they may still clean up.
    """
    leaders = tuple(sessions)
    for process in members_of(leaders):
        with contextlib.suppress(psutil.Error):
            process.terminate()
    if wait_gone(leaders, terminate):
        return ()
    killed: dict[int, str] = {}
    patience = time.monotonic() + TRACKER_S
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        left = members_of(leaders)
        if not left:
            break
        for process in left:
            if time.monotonic() < patience and is_resource_tracker(process):
                continue
            killed.setdefault(process.pid, describe(process))
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    return tuple(killed.values())


TRACKER_S = 2.0
"""How long a resource tracker may take to clean up behind processes that were killed."""


def is_resource_tracker(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's: it ignores SIGTERM, and once all that it tracks for have ended it removes the
    shared memory that they left, and ends. Nothing else removes that memory.
    """
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False
