# SPDX-License-Identifier: Apache-2.0
"""A container's whole life leaves nothing behind, whether its driver ends or is killed. The engine is real."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from qualify.cells import load
from qualify.containers import base, container, image, tree
from qualify.containers.container import DRIVER, Job
from qualify.containers.engine import Engine, clear, opened

# the SDK leaves the object of a hijacked connection to the collector; the connection itself is closed
pytestmark = pytest.mark.filterwarnings("ignore:.*socket.socket:pytest.PytestUnraisableExceptionWarning")

ROOT = Path(__file__).resolve().parent.parent.parent

DRIVE_HOST = """
import sys
from qualify.containers.container import Job, living
from qualify.containers.engine import opened
with opened("host") as engine, living(engine, Job(sys.argv[1], ["sleep", "600"], 600, place="/")) as made:
    made.start()
    print(made.id, flush=True)
    sys.stdin.read()
"""

DRIVE_OWN = """
import sys
from pathlib import Path
from qualify.containers.container import Job, living
from qualify.containers.engine import opened
with opened("own", Path(sys.argv[1])) as engine:
    archive = Path(sys.argv[2]).read_bytes()
    engine.client.api.import_image_from_data(archive, repository="afd-tiny", tag="test")
    with living(engine, Job("afd-tiny:test", ["sleep", "600"], 600, place="/")) as made:
        made.start()
        print(made.id, flush=True)
        sys.stdin.read()
"""


def everything(engine: Engine) -> list[str]:
    """Every container that the engine knows, running or not."""
    return [found.id or "" for found in engine.client.containers.list(all=True)]


def killed(code: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Start a driver, wait until its container runs, SIGKILL it; the container's id."""
    words = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        seen = driver.stdout.readline().strip()
        driver.send_signal(signal.SIGKILL)
        driver.wait(timeout=20)
    assert len(seen) == 64, "the driver made no container"
    return seen


def output(engine: Engine, job: Job) -> tuple[int, str]:
    """Status and output of a job."""
    out = io.BytesIO()
    status = container.run(engine, job, out)
    return status, out.getvalue().decode()


def test_a_job_runs_without_network_root_and_capabilities_and_leaves_nothing(
    engine: Engine, tiny: str
) -> None:
    """Its status is the command's; it is no root, sees the loopback alone, and is gone afterwards."""
    script = "cat /proc/self/status /proc/net/dev; exit 7"
    status, said = output(engine, Job(tiny, ["sh", "-c", script], 30, place="/"))
    assert status == 7
    assert "Uid:\t1000\t1000\t1000\t1000" in said
    assert "CapEff:\t0000000000000000" in said
    assert "NoNewPrivs:\t1" in said
    assert re.findall(r"^ *(\w+): +\d+ +\d+", said, re.MULTILINE) == ["lo"]
    assert everything(engine) == []


def test_a_job_gets_its_files_and_ends_at_its_limit(engine: Engine, tiny: str) -> None:
    """The archive lies at its place before the command starts; past the limit the status is that of `timeout`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("word")
        entry.size = 5
        archive.addfile(entry, io.BytesIO(b"hello"))
    buffer.seek(0)
    job = Job(tiny, ["sh", "-c", "cat /etc/word; sleep 60"], 2, archive=buffer, place="/etc")
    started = time.monotonic()
    assert output(engine, job) == (124, "hello")
    assert time.monotonic() - started < 30
    assert everything(engine) == []


def test_an_error_in_the_context_removes_the_container(engine: Engine, tiny: str) -> None:
    """Whatever is raised between making and running, the container goes."""
    with pytest.raises(RuntimeError, match="driver failed"):  # noqa: PT012, SIM117
        with container.living(engine, Job(tiny, ["sleep", "600"], 600, place="/")) as made:
            made.start()
            assert everything(engine) == [made.id]
            raise RuntimeError("the driver failed")
    assert everything(engine) == []


def test_what_a_killed_driver_leaves_is_swept_at_the_next_start_and_a_living_one_keeps_its_own(
    engine: Engine, tiny: str
) -> None:
    """After SIGKILL the container runs on in an engine that is not ours; whoever comes next removes it alone."""
    left = killed(DRIVE_HOST, tiny, environment={"DOCKER_HOST": engine.host})
    assert everything(engine) == [left]
    with container.living(engine, Job(tiny, ["sleep", "600"], 600, place="/")) as mine:
        assert everything(engine) == [mine.id]
        assert container.sweep(engine) == ()
        assert everything(engine) == [mine.id]
    assert everything(engine) == []


@pytest.mark.parametrize("label", ["1 0.0 another-boot", "999999999 1.0 {boot}", "{pid} 1.0 {boot}"])
def test_a_driver_of_another_boot_a_number_unused_and_a_number_used_again_do_not_live(label: str) -> None:
    """The number alone proves nothing; this process's own label does."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    assert not container.lives(label.format(boot=boot, pid=os.getpid()))
    assert container.lives(container.driver())


def test_our_own_engine_ends_with_its_killed_driver_and_the_next_start_finds_nothing(
    engine: Engine, tiny: str, tmp_path: Path
) -> None:
    """SIGKILL of the driver ends the engine and its container; the next start leaves no container and no folder."""
    exported = tmp_path / "tiny.tar"
    made = engine.client.containers.create(tiny, ["cat"])
    exported.write_bytes(b"".join(made.export()))
    made.remove()
    data = tmp_path / "data"
    killed(DRIVE_OWN, str(data), str(exported))
    owner = json.loads((data / "owner.json").read_text(encoding="utf-8"))
    folder = Path(owner["folder"])
    assert folder.is_dir()
    psutil.wait_procs([psutil.Process(owner["pid"])] if psutil.pid_exists(owner["pid"]) else [], timeout=60)
    assert not psutil.pid_exists(owner["pid"]), "the engine outlived its driver"
    with opened("own", data) as again:
        assert not folder.exists()
        container.sweep(again)
        assert everything(again) == []
        assert [str(tag) for found in again.client.images.list() for tag in found.tags] == ["afd-tiny:test"]
        second = Path(json.loads((data / "owner.json").read_text(encoding="utf-8"))["folder"])
    assert not second.exists()
    assert not (data / "owner.json").exists()
    clear(data)  # nothing to do, and it says so by doing nothing


def test_secrets_of_a_build_are_in_no_layer_and_in_no_history(
    engine: Engine, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that read both secrets leaves neither in the image's files nor in its description."""
    root = tmp_path / "root"
    for name in ("pyproject.toml", *load("cpu").locks, *(f"qualify/{maker}" for maker in image.MAKERS)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n", encoding="utf-8")
    (root / "containers" / "cpu.Dockerfile").write_text(
        "ARG BASE\nFROM ${BASE}\nRUN --mount=type=secret,id=index --mount=type=secret,id=ca "
        'set -e; . /run/secrets/index; [ -n "$PIP_WORD" ]; cat /run/secrets/ca > /dev/null; '
        "echo done > /made\n",
        encoding="utf-8",
    )
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("secret-bundle\n", encoding="utf-8")
    monkeypatch.setenv("PIP_WORD", "a secret-word")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    monkeypatch.setattr(base, "chosen", lambda *_, **__: tiny)
    monkeypatch.setattr(image, "NEEDED_BYTES", 0)
    made = image.Recipe(load("cpu"), root)
    identity = image.build(engine, made, "rootfs")
    held = tree.of_image(engine, identity)
    assert "made" in held
    saved = b"".join(engine.client.images.get(identity).save())
    assert b"secret-word" not in saved
    assert b"secret-bundle" not in saved
    described = json.dumps([engine.client.api.history(identity), engine.client.api.inspect_image(identity)])
    assert "secret-word" not in described
    assert everything(engine) == []
    assert DRIVER not in described
