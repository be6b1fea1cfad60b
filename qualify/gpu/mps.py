# SPDX-License-Identifier: Apache-2.0
"""The MPS daemon for the time of a `with` block: several roles on one GPU then run side by side, not in time
slices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"


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
    if PIPES in os.environ and _answers(found):
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
        # this process is a client itself and would hold up a plain quit
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([found], input="quit -t 5\n", text=True, timeout=40, check=False)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _answers(control: str) -> bool:
    try:
        asked = subprocess.run(
            [control], input="get_server_list\n", text=True, capture_output=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0
