# SPDX-License-Identifier: Apache-2.0
"""What a build asks of an engine, and how the command ends. The engine stands in; tests/containers has a real one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from docker.errors import DockerException, ImageNotFound

from qualify.cells import load
from qualify.containers import __main__ as commands
from qualify.containers import base, checkout, container, image, tree
from qualify.containers.engine import Engine, EngineError
from qualify.process import CommandError

BASE = b"a root filesystem"


class Client:
    """An engine that keeps the names of its images and what was imported."""

    def __init__(self, root: Path) -> None:
        self.known: dict[str, str] = {}
        self.imported: list[bytes] = []
        self.images = SimpleNamespace(get=self._get)
        self.api = SimpleNamespace(import_image=self._import)
        self._root = root

    def _get(self, tag: str) -> Any:
        if tag not in self.known:
            raise ImageNotFound(tag)
        return SimpleNamespace(id=self.known[tag])

    def _import(self, handle: BinaryIO, repository: str, tag: str) -> None:
        self.imported.append(handle.read())
        self.known[f"{repository}:{tag}"] = "sha256:base"

    def info(self) -> dict[str, str]:
        """What the engine says about itself."""
        return {"ServerVersion": "20.10", "Driver": "overlay2", "DockerRootDir": str(self._root)}


def _program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine, an mmdebstrap that writes BASE, a docker that writes down how it is called and what it is shown."""
    programs = tmp_path / "bin"
    _program(programs, "unshare", 'shift; exec "$@"')
    _program(
        programs,
        "mmdebstrap",
        f'echo "$@" >> {tmp_path}/debian; for last; do :; done; printf "{BASE.decode()}" > "$last"',
    )
    _program(
        programs,
        "docker",
        f'[ "$1" = buildx ] && exit 0\nprintf "%s\\n" "$@" > {tmp_path}/asked\nenv > {tmp_path}/environment\n'
        f'for word; do case "$word" in id=*) cat "${{word#*src=}}" >> {tmp_path}/secrets;; esac; done\n'
        f'for last; do :; done; (cd "$last" && find . -type f | sort) > {tmp_path}/context',
    )
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(image, "NEEDED_BYTES", 0)
    return Engine(Client(tmp_path), "unix:///engine")  # type: ignore[arg-type]


def client(engine: Engine) -> Client:
    """The stand-in behind an engine."""
    assert isinstance(engine.client, Client)
    return engine.client


def test_a_base_is_made_once_of_a_cells_packages_and_imported_under_their_digest(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another list of packages is another base; `fresh` makes it anew; what is printed is its bytes' digest."""
    tag = base.chosen(engine, "rootfs")
    assert tag == f"afd-base:{base.recipe()}"
    assert client(engine).imported == [BASE]
    assert hashlib.sha256(BASE).hexdigest() in capsys.readouterr().out
    words = (tmp_path / "debian").read_text().split()
    assert f"--include={','.join(base.PACKAGES)}" in words
    assert base.SUITE in words
    assert base.chosen(engine, "rootfs") == tag
    assert len(client(engine).imported) == 1
    with monkeypatch.context() as patch:
        patch.setattr(base, "PACKAGES", (*base.PACKAGES, "less"))
        assert base.chosen(engine, "rootfs") != tag
    base.chosen(engine, "rootfs", fresh=True)
    assert len(client(engine).imported) == 3


def test_a_base_that_cannot_be_made_says_why_and_nothing_is_imported(engine: Engine, tmp_path: Path) -> None:
    """mmdebstrap's own words are in the error."""
    _program(tmp_path / "bin", "mmdebstrap", "echo 'E: no such suite' >&2; exit 25")
    with pytest.raises(CommandError, match=r"(?s)exited with 25.*no such suite"):
        base.chosen(engine, "rootfs")
    assert client(engine).imported == []


def test_a_build_is_given_secrets_as_files_and_the_locks_as_its_context(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where packages come from reaches docker by no word and no variable, and the files are gone afterwards."""
    monkeypatch.setenv("PIP_WORD", "a-secret-place")
    made = image.recipe("cpu")
    client(engine).known[made.tag] = "sha256:cell"
    assert image.build(engine, made, "rootfs", fresh=True) == "sha256:cell"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:3] == ["--host", "unix:///engine", "build"]
    assert f"BASE=afd-base:{base.recipe()}" in asked
    assert f"org.afd-plugin.lock={made.cell.lock_digest()}" in asked
    assert {"--no-cache", str(made.dockerfile), made.tag} <= set(asked)
    assert "a-secret-place" in (tmp_path / "secrets").read_text()
    assert "a-secret-place" not in (tmp_path / "asked").read_text() + (tmp_path / "environment").read_text()
    files = {line.removeprefix("./") for line in (tmp_path / "context").read_text().splitlines()}
    assert files == {*made.cell.locks, *(f"qualify/{name}" for name in image.MAKERS)}
    sources = [word.partition("src=")[2] for word in asked if word.startswith("id=")]
    assert sources
    assert not [path for path in sources if Path(path).exists()]


def test_too_little_room_is_told_before_anything_is_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names what is free, what is needed and the way out."""
    monkeypatch.setattr(image, "NEEDED_BYTES", 2**60)
    with pytest.raises(EngineError, match=r"GiB free, an image needs .*AFD_ENGINE_DIR"):
        image.build(engine, image.recipe("cpu"), "rootfs")
    assert client(engine).imported == []


def test_an_image_that_was_not_built_for_these_locks_is_not_used(engine: Engine) -> None:
    """A changed lock is another image, and the sentence says what makes it."""
    with pytest.raises(EngineError, match=r"there is no image afd-cpu:.*containers -- build cpu"):
        image.standing(engine, image.recipe("cpu"))


@pytest.fixture
def command(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[container.Job]:
    """The command line over that engine; the jobs that would run, each ending with status 7."""
    jobs: list[container.Job] = []

    @contextlib.contextmanager
    def opened(choice: str) -> Iterator[Engine]:
        yield engine

    @contextlib.contextmanager
    def archived(root: Path) -> Iterator[None]:
        yield None

    def run(engine: Engine, job: container.Job) -> int:
        jobs.append(job)
        return 7

    monkeypatch.setattr(commands, "opened", opened)
    monkeypatch.setattr(checkout, "archived", archived)
    monkeypatch.setattr(container, "run", run)
    monkeypatch.setattr(container, "shell", run)
    monkeypatch.setattr(container, "sweep", lambda _: ("left_behind",))
    for name in ("cpu", "h200x2"):
        client(engine).known[image.recipe(name).tag] = f"sha256:{name}"
    return jobs


def test_a_session_runs_in_its_cells_image_within_its_limit_and_its_status_is_the_commands(
    command: list[container.Job],
) -> None:
    """What follows the session is the session's; a GPU cell asks for its GPUs."""
    assert commands.main(["run", "--limit", "60", "unit", "-k", "lock"]) == 7
    assert commands.main(["run", "--cell", "h200x2", "gpu_e2e"]) == 7
    assert commands.main(["shell"]) == 7
    unit, gpu, shell = command
    assert (unit.image, unit.command, unit.limit_s, unit.gpus) == (
        "sha256:cpu",
        ["nox", "-s", "unit", "--", "-k", "lock"],
        60.0,
        0,
    )
    assert (gpu.image, gpu.gpus, list(gpu.command)[-3:]) == ("sha256:h200x2", 2, ["nox", "-s", "gpu_e2e"])
    assert shell.limit_s > 3600
    assert {job.user for job in command} == {container.USER}


def test_the_command_builds_sweeps_and_says_what_the_engine_is(
    command: list[container.Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prints what came of it."""
    assert commands.main(["build", "cpu"]) == 0
    assert f"{image.recipe('cpu').tag} is sha256:cpu" in capsys.readouterr().out
    assert commands.main(["sweep"]) == 0
    assert "left_behind" in capsys.readouterr().out
    assert commands.main(["probe"]) == 0
    assert "engine 20.10, storage overlay2" in capsys.readouterr().out
    assert command == []


def test_two_images_are_compared_entry_by_entry(
    command: list[container.Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Equal trees are status 0; one that differs is 1 with the names."""
    monkeypatch.setattr(tree, "of_image", lambda *_: {"a": "f 644 1", "b": "f 644 2"})
    kept = tmp_path / "tree.json"
    assert commands.main(["digest", "--out", str(kept)]) == 0
    assert commands.main(["digest", "--against", str(kept)]) == 0
    kept.write_text(json.dumps({"a": "f 644 1", "b": "f 755 2"}), encoding="utf-8")
    assert commands.main(["digest", "--against", str(kept)]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["b", "1 entries differ"]


def test_what_an_engine_refuses_is_one_sentence_and_never_the_status_of_a_missing_engine(
    command: list[container.Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken image or an unknown cell is a failure of the project, not of the host."""

    def refuses(*_: object) -> int:
        raise DockerException("no space left on device")

    monkeypatch.setattr(container, "run", refuses)
    assert commands.main(["run", "unit"]) == 2
    assert capsys.readouterr().err == "containers: no space left on device\n"
    assert commands.main(["build", "moon"]) == 2
    assert "no cell is called 'moon'" in capsys.readouterr().err
    assert load("cpu").devices == 0
