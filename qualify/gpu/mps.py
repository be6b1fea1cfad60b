# SPDX-License-Identifier: Apache-2.0
"""The MPS daemon for the time of a `with` block: several roles on one GPU then run side by side, not in time
slices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
QUIT_S, GONE_S = 20.0, 5.0
"""How long the daemon may take to answer a quit, and to be gone after it."""


@contextmanager
def daemon() -> Iterator[bool]:
    """Start the daemon, point this process's children at it, and quit it at the end; yields whether it runs.

    One that this process is already told of, and that answers, is shared and left running.
    """
    found = shutil.which(CONTROL) or next(
        (str(path) for path in Path("/usr/local/nvidia").glob(f"**/{CONTROL}")), None
    )
    if found is None:
        yield False
        return
    if PIPES in os.environ and _servers(found) is not None:
        yield True
        return
    folder = tempfile.mkdtemp(prefix="afd-mps-")
    names = {PIPES: f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for path in names.values():
        Path(path).mkdir()
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    subprocess.run([found, "-d"], check=True, timeout=30)
    try:
        yield True
    finally:
        _end(found, Path(names[PIPES]))
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _end(control: str, pipes: Path) -> None:
    """Ask the daemon to quit; end it and its servers by their ids where it does not: nothing outlives the block."""
    processes = _processes(control, pipes)
    with suppress(subprocess.TimeoutExpired):
        subprocess.run([control], input="quit -t 5\n", text=True, timeout=QUIT_S, check=False)
    deadline = time.monotonic() + GONE_S
    while (left := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        print(f"gpu: the MPS daemon did not quit within {QUIT_S:g} s and was ended", file=sys.stderr)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _processes(control: str, pipes: Path) -> list[psutil.Process]:
    """The daemon, by the file that it writes, and its servers, by what it says."""
    words = []
    with suppress(OSError):
        words += (pipes / f"{CONTROL}.pid").read_text(encoding="utf-8").split()
    words += (_servers(control) or "").split()
    found = []
    for word in words:
        with suppress(psutil.NoSuchProcess, ValueError):
            found.append(psutil.Process(int(word)))
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _servers(control: str) -> str | None:
    """What the daemon says of its servers; None where no daemon answers."""
    try:
        asked = subprocess.run(
            [control], input="get_server_list\n", text=True, capture_output=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return asked.stdout if asked.returncode == 0 else None
