# SPDX-License-Identifier: Apache-2.0
"""One container's life: made, filled, run to its end or its limit, and removed, whatever happens meanwhile.

A container carries a label that names its driver: process number, start time and boot. Leaving the context removes
it. A driver that was killed cannot, so whoever enters the next context does: every container of a driver that lives no
more. And the command is bounded inside the container too, so that it ends even when nobody ever comes back.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil
from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.types import DeviceRequest

from qualify.containers.engine import Engine, EngineError

DRIVER = "org.afd-plugin.driver"
USER = "afd"
REMOVAL_S = 30.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Job:
    """What runs in a container: image, command, limit in seconds, environment, and an archive put at `place`.

    `gpus` devices are asked of the engine, which needs NVIDIA's container toolkit for it.
    """

    image: str
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    archive: BinaryIO | None = None
    place: str = "/srv/checkout"
    user: str = USER
    gpus: int = 0


def driver(process: psutil.Process | None = None) -> str:
    """The label's value for a driver: this process unless another is given."""
    process = process or psutil.Process()
    return f"{process.pid} {process.create_time():.1f} {_BOOT.read_text(encoding='utf-8').strip()}"


def lives(label: str) -> bool:
    """Whether the driver that a label names is still running on this boot."""
    number, started, boot = label.split(" ")
    if boot != _BOOT.read_text(encoding="utf-8").strip():
        return False
    try:
        return abs(psutil.Process(int(number)).create_time() - float(started)) < 2.0
    except psutil.NoSuchProcess:
        return False


def sweep(engine: Engine) -> tuple[str, ...]:
    """Remove every container of ours whose driver is gone; their names."""
    gone = []
    for found in engine.client.containers.list(all=True, filters={"label": DRIVER}, ignore_removed=True):
        if not lives(found.labels[DRIVER]):
            _remove(found)
            gone.append(str(found.name))
    return tuple(gone)


@contextlib.contextmanager
def living(engine: Engine, job: Job) -> Iterator[Container]:
    """A container that has been made and filled but not started; removed when the context is left."""
    for name in sweep(engine):
        print(f"removed {name}, which a driver that was killed had left", flush=True)
    made = engine.client.containers.create(
        job.image,
        ["timeout", "--kill-after=20", f"{job.limit_s:g}", *job.command],
        labels={DRIVER: driver()},
        environment=dict(job.environment),
        user=job.user,
        working_dir=job.place,
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        init=True,
        shm_size="2g",
        pids_limit=8192,
        device_requests=[DeviceRequest(count=job.gpus, capabilities=[["gpu"]])] if job.gpus else None,
    )
    try:
        if job.archive is not None and not made.put_archive(job.place, job.archive):
            raise EngineError(f"the engine did not take the files for {job.place}")
        yield made
    finally:
        _remove(made)


def run(engine: Engine, job: Job, out: BinaryIO | None = None) -> int:
    """Run a job to its end, its output going to `out` (default: standard output); the exit status."""
    sink = out or sys.stdout.buffer
    with living(engine, job) as made:
        # attached before the start: nothing is lost, be the command ever so short
        with contextlib.closing(made.attach(stream=True)) as blocks:
            _start(made)
            for block in blocks:
                sink.write(block)
                sink.flush()
        return int(made.wait(timeout=REMOVAL_S)["StatusCode"])


def shell(engine: Engine, job: Job) -> int:
    """A shell on this terminal, in a container that lives as long as the shell does."""
    if not sys.stdin.isatty():
        raise EngineError("a shell needs a terminal; `run SESSION` needs none")
    waiting = Job(
        job.image, ["sleep", "infinity"], job.limit_s, job.environment, job.archive, job.place, gpus=job.gpus
    )
    with living(engine, waiting) as made:
        _start(made)
        words = engine.cli("exec", "-it", str(made.id), "bash")
        return subprocess.run(words, check=False, timeout=job.limit_s).returncode


def _start(made: Container) -> None:
    """Start it; EngineError with a sentence where the engine has no GPU to give."""
    try:
        made.start()
    except APIError as error:
        if "could not select device driver" in str(error):
            raise EngineError(
                "this engine gives no container a GPU: NVIDIA's container toolkit is not installed, or there is no GPU"
            ) from error
        raise


def _remove(found: Container) -> None:
    """Remove by force and wait until the engine no longer knows it."""
    deadline = time.monotonic() + REMOVAL_S
    while True:
        try:
            found.remove(force=True, v=True)
        except NotFound:
            return
        except APIError as error:  # a removal by someone else is under way
            if error.status_code != 409 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
