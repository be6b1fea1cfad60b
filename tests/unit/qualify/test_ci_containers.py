# SPDX-License-Identifier: Apache-2.0
"""`.ci/containers`, what needs no engine: how it ends. The script is the real one; what it calls stands in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
PROBED = 'case "$*" in *probe*) echo probed; exit 0;; esac'
"""Stands in for an engine that starts: a unit test has none."""


def _program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with every program and room enough, a `dockerd` that does not start and sessions that pass; `called` lists
    them.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    _program(folder, "dockerd", "echo cgroups: permission denied >&2; exit 1")
    _program(folder, "mmdebstrap", "exit 0")
    _program(folder, "df", "echo Avail; echo 20")
    _program(folder, "nox", f'echo "$*" >> {tmp_path}/called')
    _program(folder, "python3", f"echo {folder}/cell-python")  # what `python3 -m qualify.environment` prints
    _program(folder, "cell-python", f'exec {sys.executable} "$@"')
    return folder


def _start(host: Path) -> subprocess.Popen[str]:
    variables = os.environ | {
        "PATH": f"{host}{os.pathsep}{os.environ['PATH']}",
        "AFD_ENGINE_DIR": str(host.parent / "engines"),
    }
    words = ["bash", str(ROOT / ".ci" / "containers")]
    return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _run(host: Path) -> tuple[int, str]:
    with _start(host) as script:
        said, _ = script.communicate(timeout=100)
    return script.returncode, said


def _called(host: Path) -> list[str]:
    record = host.parent / "called"
    return record.read_text(encoding="utf-8").splitlines() if record.exists() else []


def test_a_host_without_an_engine_is_told_in_one_line_and_by_status_3(host: Path) -> None:
    """The daemon's own words are in it, no session runs, and nothing of the engine is left."""
    status, said = _run(host)
    assert status == 3
    lines = [line for line in said.splitlines() if "no engine" in line]
    assert len(lines) == 1
    assert ("cgroups: permission denied" if os.geteuid() == 0 else "needs root") in lines[0]
    assert _called(host) == []
    assert not (host.parent / "engines" / "ci-engine").exists()


def test_a_host_without_room_is_one_without_an_engine(host: Path) -> None:
    """Nothing is installed or started there."""
    _program(host, "df", "echo Avail; echo 19")
    status, said = _run(host)
    assert status == 3
    assert "NOT RUN, no engine: 19 GB are free and 20 are needed" in said
    assert "engine: " not in said.replace("no engine: ", "")
    assert _called(host) == []


def test_the_unit_tests_have_time_enough_on_a_host_twice_as_slow(host: Path) -> None:
    """They took 602 s; the limit inside the container is the one that ends them, with its own words."""
    _program(host, "cell-python", f'{PROBED}\nexec {sys.executable} "$@"')
    _, said = _run(host)
    words = _called(host)[-1].split()
    inside = int(words[words.index("--limit") + 1])
    outside = next(line for line in said.splitlines() if line.startswith("containers: unit: "))
    assert 2 * 602 < inside < int(outside.partition("at most ")[2].partition(",")[0])


def test_every_step_runs_and_its_time_is_printed(host: Path) -> None:
    """An image, the parity check of 1A1F and the unit tests in it: each with its seconds and its status."""
    _program(host, "cell-python", f'{PROBED}\nexec {sys.executable} "$@"')
    status, said = _run(host)
    assert status == 0, said
    assert [line.split(" -- ")[1].split(" --")[0] for line in _called(host)] == [
        "test",
        "build",
        "run",
        "run",
    ]
    assert [line.split()[-1] for line in _called(host)] == ["test", "cpu", "qwen3-moe", "unit"]
    for name in ("engine", "life", "build", "parity 1A1F", "unit"):
        assert f"containers: {name}: " in said
    assert "s in all, exit status 0" in said


def test_a_step_that_fails_is_a_failure_and_what_the_engine_held_is_removed(host: Path) -> None:
    """Its status is passed on, later steps do not run; a failure is never the status of a host without an engine."""
    _program(host, "cell-python", f'{PROBED}\nexec {sys.executable} "$@"')
    held = host.parent / "engines" / "ci-engine" / "image"
    _program(
        host,
        "nox",
        f'echo "$*" >> {host.parent}/called; mkdir -p {held}; case "$*" in *build*) exit 1;; esac',
    )
    status, said = _run(host)
    assert status == 1
    assert "containers: build: " in said
    assert len(_called(host)) == 2
    assert not held.parent.exists()


@pytest.mark.parametrize("step", ["test", "build", "demo", "unit"])
def test_only_the_engine_says_that_there_is_none(host: Path, step: str) -> None:
    """nox ends with 3, too, for a session that it does not know: that is a failure."""
    _program(host, "cell-python", f'{PROBED}\nexec {sys.executable} "$@"')
    _program(host, "nox", f'case "$*" in *{step}*) exit 3;; esac')
    assert _run(host)[0] == 1


def test_a_script_that_is_ended_ends_its_step_and_removes_the_engine(host: Path) -> None:
    """SIGTERM reaches the step that runs, and the way out is the same as ever."""
    _program(host, "cell-python", f'{PROBED}\nexec {sys.executable} "$@"')
    held = host.parent / "engines" / "ci-engine"
    _program(host, "nox", f"mkdir -p {held}; echo started $$; exec sleep 60")
    with _start(host) as script:
        assert script.stdout is not None
        step = next(int(line.split()[1]) for line in script.stdout if line.startswith("started"))
        script.send_signal(signal.SIGTERM)
        script.communicate(timeout=60)
    assert script.returncode == 143
    assert not psutil.pid_exists(step)
    assert not held.exists()
