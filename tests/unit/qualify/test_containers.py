# SPDX-License-Identifier: Apache-2.0
"""Containers, what needs no engine: secrets, what a build may see, the checkout's copy, one digest of a tree."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import msgspec
import psutil
import pytest
from docker.errors import APIError

from qualify.cells import load
from qualify.containers import __main__ as commands
from qualify.containers import base, checkout, container, engine, image, secrets, tree
from qualify.containers.engine import EngineError
from qualify.environment import locked


def test_index_settings_are_addresses_and_options_but_nothing_of_this_hosts_disk() -> None:
    """The environment wins over pip's own settings; files, folders and other variables stay here."""
    environment = {
        "PIP_CERT": "/etc/ssl/bundle.pem",
        "PIP_TIMEOUT": "180",
        "https_proxy": "http://proxy.example:3128",
        "SECRET_TOKEN": "x",
        "UV_CACHE_DIR": "~/cache",
        "PIP_EMPTY": "",
    }
    configured = {
        "global.first-index": "https://mirror.example/simple",
        "global.second": "file:///srv/simple",
        "global.constraint": "/etc/pip/constraints.txt",
        "global.timeout": "5",
        "freeze.third": "https://other.example",
    }
    assert secrets.index_settings(environment, configured) == {
        "PIP_FIRST_INDEX": "https://mirror.example/simple",
        "PIP_TIMEOUT": "180",
        "https_proxy": "http://proxy.example:3128",
    }
    changed = environment | {"PIP_FIRST_INDEX": "https://mine.example"}
    assert secrets.index_settings(changed, configured)["PIP_FIRST_INDEX"] == "https://mine.example"


def test_the_first_bundle_that_is_a_file_is_taken(tmp_path: Path) -> None:
    """A variable that names no file is passed over."""
    there = tmp_path / "bundle.pem"
    there.write_text("x", encoding="utf-8")
    assert secrets.bundle({"SSL_CERT_FILE": str(tmp_path / "none"), "PIP_CERT": str(there)}) == there


def test_secrets_are_written_for_their_owner_alone_and_survive_a_shell(tmp_path: Path) -> None:
    """A value with quotes and spaces comes back as it was; nobody else may read the files."""
    value = 'it\'s a "word" $HOME'
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("certificates", encoding="utf-8")
    folder = tmp_path / "secrets"
    folder.mkdir()
    made = secrets.written(folder, {"PIP_WORD": value, "SSL_CERT_FILE": str(bundle)})
    script = f'. {made["index"]}; printf %s "$PIP_WORD"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == value
    assert made["ca"].read_text(encoding="utf-8") == "certificates"
    assert {path.stat().st_mode & 0o777 for path in made.values()} == {0o600}


@pytest.mark.parametrize("name", ["debian", "debian:12", "debian@sha256:abc", "rootfs@sha256:" + "0" * 63])
def test_a_base_that_is_not_pinned_by_digest_is_refused(name: str) -> None:
    """Only a full digest names one image."""
    with pytest.raises(EngineError, match="pinned as NAME@sha256:DIGEST"):
        base.chosen(None, name)  # type: ignore[arg-type]  # no engine is asked
    pinned = "registry.example:5000/debian@sha256:" + "0" * 64
    assert base.chosen(None, pinned) == pinned  # type: ignore[arg-type]


def test_without_mmdebstrap_the_base_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is installed silently."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="no mmdebstrap: install it"):
        base.bootstrap(tmp_path / "base.tar")


@pytest.mark.parametrize("name", ["cpu", "h200x1", "h200x2"])
def test_a_build_sees_the_locks_and_what_makes_a_cell_of_them_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    """And the image's name changes with the lock."""
    made = image.recipe(name)
    made.context(tmp_path)
    seen = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    makers = {f"qualify/{maker}" for maker in image.MAKERS}
    assert seen == {*made.cell.locks, *makers}
    assert made.tag == f"afd-{'cpu' if name == 'cpu' else 'cuda'}:{made.cell.lock_digest()[:12]}"
    words = ["python3", "-I", "-c", "import sys; sys.path.insert(0, '.'); import qualify.environment"]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=60)


def _instructions(dockerfile: Path) -> list[str]:
    """The instructions of a Dockerfile, continued lines joined, comments left out."""
    lines = dockerfile.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("name", ["cpu", "h200x1"])
def test_an_image_is_a_given_base_hashed_locks_and_a_user_without_root(name: str) -> None:
    """No image is named, nothing is fetched but what a lock pins, secrets stay mounts, and the last user is `afd`."""
    steps = _instructions(image.recipe(name).dockerfile)
    assert steps[:2] == ["ARG BASE", "FROM ${BASE}"]
    assert [step.split()[0] for step in steps].count("FROM") == 1
    assert [step for step in steps if step.startswith("USER")][-1] == "USER afd"
    making = [step for step in steps if "/run/secrets/" in step]
    assert len(making) == 1
    assert making[0].startswith(
        "RUN --mount=type=secret,id=index,uid=1000 --mount=type=secret,id=ca,uid=1000"
    )
    assert not [step for step in steps if step.startswith(("ADD", "ARG")) and step not in _ARGUMENTS]
    assert not [step for step in steps if "apt-get" in step or "curl" in step or "wget" in step]


_ARGUMENTS = {"ARG BASE", "ARG SOURCE_DATE_EPOCH"}


def test_the_image_of_the_cuda_cells_installs_their_lock_and_says_that_it_is_unvalidated() -> None:
    """One image for both cells, since they share their lock; until it ran on a GPU, its label and its text say so."""
    made, other = image.recipe("h200x1"), image.recipe("h200x2")
    assert (made.tag, made.dockerfile) == (other.tag, other.dockerfile)
    text = made.dockerfile.read_text(encoding="utf-8")
    assert "UNVALIDATED" in text
    assert 'LABEL org.afd-plugin.validated="no"' in text
    assert "image" in made.cell.debt
    (lock,) = made.cell.locks
    assert f"--no-deps --require-hashes --progress-bar off         --requirement {lock}" in text.replace(
        "\\\n", ""
    )
    assert "g++" in base.PACKAGES  # Triton compiles a launcher for each kernel, torch on a CPU whole kernels
    assert made.needed_bytes == 2 * image.recipe("cpu").needed_bytes


def test_a_session_of_a_gpu_cell_finds_the_checkout_installed(tmp_path: Path) -> None:
    """The CPU cell's sessions do that themselves; what a session is given stays apart, word by word."""
    assert image.recipe("cpu").words("unit", ["-k", "a b"]) == ["nox", "-s", "unit", "--", "-k", "a b"]
    words = image.recipe("h200x2").words("gpu_e2e", ["--cell", "a b"])
    for name in ("python", "nox"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name}; printf "<%s>" "$@"; echo\n', encoding="utf-8")
        program.chmod(0o755)
    variables = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    said = subprocess.run(words, env=variables, capture_output=True, text=True, check=True, timeout=20).stdout
    installed, session = said.splitlines()[1::2]
    assert installed.startswith("<-m><pip><install>")
    assert installed.endswith("<--editable><.>")
    assert session == "<-s><gpu_e2e><--><--cell><a b>"


def test_a_cell_without_a_lock_has_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """There would be nothing exact to install."""
    bare = msgspec.structs.replace(load("h200x2"), locks=(), lock_sha256=None)
    monkeypatch.setattr(image, "load", lambda _: bare)
    with pytest.raises(EngineError, match="cell h200x2 has no lock yet"):
        image.recipe("h200x2")


def _git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, timeout=60)


def test_the_copy_of_the_checkout_is_the_work_tree_as_it_is_now_with_its_history(tmp_path: Path) -> None:
    """Changed, new, staged and removed files are carried over, ignored ones are not; all belongs to the user."""
    root = tmp_path / "root"
    root.mkdir()
    _git(root, "init", "--quiet")
    for name, text in {"kept": "1", "changed": "1", "removed": "1", ".gitignore": "built\n"}.items():
        (root / name).write_text(text, encoding="utf-8")
    _git(root, "add", ".")
    _git(root, "commit", "--quiet", "-m", "first")
    (root / "changed").write_text("2", encoding="utf-8")
    (root / "removed").unlink()
    (root / "new").write_text("2", encoding="utf-8")
    (root / "built").write_text("2", encoding="utf-8")
    (root / "staged").write_text("2", encoding="utf-8")
    _git(root, "add", "staged")
    with checkout.archived(root) as handle, tarfile.open(fileobj=handle) as archive:
        names = {entry.name.removeprefix("./"): entry for entry in archive}
        content = archive.extractfile(names["changed"])
        assert content is not None
        assert content.read() == b"2"
    files = {name for name in names if not name.startswith(".git/") and names[name].isfile()}
    assert files == {"kept", "changed", "new", "staged", ".gitignore"}
    assert ".git/HEAD" in names
    assert {(entry.uid, entry.gid, entry.uname) for entry in names.values()} == {(1000, 1000, "")}


def _tar(entries: dict[str, tuple[bytes, int]], mtime: int = 0) -> dict[str, str]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, (content, mode) in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(content), mode, mtime
            archive.addfile(entry, io.BytesIO(content))
    with tarfile.open(fileobj=io.BytesIO(buffer.getvalue())) as archive:
        return dict(tree.entries(archive))


def test_the_digest_of_a_tree_is_its_content_and_not_its_times_or_its_order() -> None:
    """A byte, a mode and a name count; times, order and the engine's own files do not."""
    one = _tar({"a": (b"1", 0o644), "b/c": (b"2", 0o755)})
    same = _tar({"./b/c": (b"2", 0o755), "a": (b"1", 0o644), "etc/hosts": (b"h", 0o644)}, mtime=7)
    assert tree.digest(one) == tree.digest(same)
    for other in (
        _tar({"a": (b"x", 0o644), "b/c": (b"2", 0o755)}),
        _tar({"a": (b"1", 0o600), "b/c": (b"2", 0o755)}),
        _tar({"a": (b"1", 0o644), "b/d": (b"2", 0o755)}),
    ):
        assert tree.digest(one) != tree.digest(other)
        assert tree.changed(one, other)
    assert tree.changed(one, same) == ()


def _docker(folder: Path, release: str, buildx: int) -> Path:
    folder.mkdir()
    script = folder / "docker"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = buildx ] && exit {buildx}\necho "Docker version {release}, build 1"\n',
        encoding="utf-8",
    )
    script.chmod(0o755)
    return script


def test_the_builder_is_the_first_docker_that_can_build_with_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one without buildx is passed over; with nothing left the sentence names what was seen."""
    bare = _docker(tmp_path / "bare", "28.2.2", 1)
    old = _docker(tmp_path / "old", "20.10.24+dfsg1", 1)
    whole = _docker(tmp_path / "whole", "28.2.2", 0)
    monkeypatch.setenv("PATH", f"{bare.parent}:{old.parent}:{whole.parent}")
    assert engine.builder_cli() == str(old)
    monkeypatch.setenv("PATH", f"{bare.parent}:{whole.parent}")
    assert engine.builder_cli() == str(whole)
    monkeypatch.setenv("PATH", str(bare.parent))
    with pytest.raises(EngineError, match=r"28\.2\.2 lacks buildx"):
        engine.builder_cli()


def _daemon(folder: Path, script: str) -> str:
    """A folder with a `dockerd` that runs `script`, put before this process's PATH."""
    folder.mkdir()
    daemon = folder / "dockerd"
    daemon.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    daemon.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_no_engine_is_one_line_and_an_exit_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a host's engine that does not answer nor an own one without dockerd or root leaves a traceback."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    assert commands.main(["sweep"]) == commands.NO_ENGINE == 3
    assert "no engine answers at" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", _daemon(tmp_path / "bin", "exit 0"))
    assert commands.main(["probe", "--engine", "own"]) == 3
    assert "needs root" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commands.main(["sweep", "--engine", "own"]) == 3
    assert "there is no dockerd: install it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "patience_s", "said"),
    [
        (
            "echo 'mount: operation not permitted' >&2; exit 1",
            10.0,
            "ended with 1: | mount: operation not permitted",
        ),
        ("echo waiting for a device >&2; exec sleep 60", 3.0, "did not serve in 3 s: | waiting for a device"),
    ],
)
def test_a_daemon_that_does_not_start_is_no_engine_with_its_own_words_and_leaves_nothing(
    script: str,
    patience_s: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a host that forbids what an engine needs: one line, its own status, no process and no folder."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(engine, "START_S", patience_s)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("AFD_ENGINE_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", _daemon(tmp_path / "bin", script))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert commands.main(["probe", "--engine", "own"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["lock"]
    assert not list(tmp_path.glob("afd-engine-*"))


def _owner(data: Path, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """A process that `data` records as its engine, as a driver that was killed leaves it."""
    for path in (data, folder):
        path.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", "import select; select.select([], [], [], 60)", *words])
    (data / "owner.json").write_text(
        json.dumps({"pid": process.pid, "folder": str(folder)}), encoding="utf-8"
    )
    return process


def test_what_is_discarded_is_gone_with_the_engine_that_a_killed_driver_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded process is ended by its number, its folder and the data root are removed; twice is no fault."""
    data, folder = tmp_path / "data", tmp_path / "folder"
    monkeypatch.setenv("AFD_ENGINE_DIR", str(data))
    with _owner(data, folder, str(folder)) as process:
        assert commands.main(["discard"]) == 0
        assert process.poll() is not None
    assert not data.exists()
    assert not folder.exists()
    assert commands.main(["discard"]) == 0
    assert str(data) in capsys.readouterr().out


def test_a_number_that_is_someone_elses_by_now_is_left_alone(tmp_path: Path) -> None:
    """A process that does not carry the engine's folder in its command line is not the engine."""
    data, folder = tmp_path / "data", tmp_path / "folder"
    with _owner(data, folder) as process:
        engine.discard(data)
        assert process.poll() is None
        process.kill()
    assert not data.exists()


def test_an_engine_in_use_is_not_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever holds the data root keeps it; the wait is bounded and the sentence names it."""
    monkeypatch.setenv("AFD_ENGINE_DIR", str(tmp_path))
    monkeypatch.setattr(engine, "DISCARD_S", 0.3)
    with locked(tmp_path / "lock"):
        assert commands.main(["discard"]) == 2
    assert "another process has held" in capsys.readouterr().err
    assert tmp_path.is_dir()


def test_an_engine_without_a_gpu_says_so_and_other_refusals_stay_what_they_are() -> None:
    """What the engine itself answers is an internal error about a device driver without a name."""

    class Made:
        def __init__(self, said: str) -> None:
            self.said = said

        def start(self) -> None:
            raise APIError(self.said)

    with pytest.raises(EngineError, match="NVIDIA's container toolkit is not installed"):
        container._start(Made('could not select device driver "" with capabilities: [[gpu]]'))  # type: ignore[arg-type]
    with pytest.raises(APIError, match="no space"):
        container._start(Made("no space left"))  # type: ignore[arg-type]
