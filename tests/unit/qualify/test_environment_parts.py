# SPDX-License-Identifier: Apache-2.0
"""The parts that an environment is made of: installers, the overlay of a checkout, an image's cell, what is pruned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from qualify import environment as env
from qualify import locks
from qualify.process import CommandError

SITE = Path(str(metadata.distribution("pip").locate_file(""))).resolve()
"""Where the running cell's distributions lie."""


def _recorder(path: Path, said: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$0 $*" >> {said}\n', encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    """A cell that has nothing but a folder for packages and an interpreter that writes down how it is called."""
    (tmp_path / "cell" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    _recorder(tmp_path / "cell" / "bin" / "python", tmp_path / "said")
    return tmp_path / "cell"


def test_both_installers_take_exactly_the_locks_with_their_hashes_and_nothing_beside(
    cell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each into the cell's own interpreter, with all lock files at once; uv compiles the byte code."""
    said = tmp_path / "said"
    files = [tmp_path / "a.lock", tmp_path / "b.lock"]
    monkeypatch.setattr(env, "find_uv", lambda _: (str(_recorder(tmp_path / "uv", said)),))
    monkeypatch.setattr(env, "_pip_into", lambda target, name, scratch: said.write_text(f"{name} {target}\n"))
    with (tmp_path / "lock").open("w") as lock:
        env.install_with_uv(cell, files, lock.fileno())
        by_uv = said.read_text().split()
        env.install_with_pip(cell, files, lock.fileno())
    first, by_pip = said.read_text().splitlines()
    assert first == f"pip {cell}/lib/python3.11/site-packages"
    assert by_pip.split()[0] == str(cell / "bin" / "python")
    for words in (by_uv, by_pip.split()):
        assert {"--no-deps", "--require-hashes"} <= set(words)
        assert [words[i + 1] for i, word in enumerate(words) if word == "--requirement"] == list(
            map(str, files)
        )
    assert by_uv[by_uv.index("--python") + 1] == str(cell / "bin" / "python")
    assert "--compile-bytecode" in by_uv


def test_the_installer_is_noxs_own_then_the_locked_one_then_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locked one is fetched once; without an index and without any the index's own fault is raised."""
    own = (sys.executable, "-m", "uv", "--version")
    fetched: list[Path] = []
    works: set[tuple[str, ...]] = {own}
    monkeypatch.setattr(env, "_runs", lambda words: words in works)
    monkeypatch.setattr(env, "_pip_into", lambda target, name, scratch: fetched.append(target))
    assert env.find_uv(tmp_path) == own[:-1]
    works.clear()
    (locked,) = env.find_uv(tmp_path)
    assert [str(target / "bin" / "uv") for target in fetched] == [locked]
    works.add((locked, "--version"))
    assert env.find_uv(tmp_path) == (locked,)
    assert len(fetched) == 1
    works.clear()

    def unreachable(target: Path, name: str, scratch: Path) -> None:
        raise CommandError("no route to an index")

    monkeypatch.setattr(env, "_pip_into", unreachable)
    monkeypatch.setenv("PATH", str(_recorder(tmp_path / "host" / "uv", tmp_path / "said").parent))
    assert env.find_uv(tmp_path) == (str(tmp_path / "host" / "uv"),)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match="no route"):
        env.find_uv(tmp_path)


def test_a_tool_is_fetched_by_its_locked_hash_alone(
    cell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requirement is the lock's own lines; the caller's wish to install elsewhere does not reach pip."""
    monkeypatch.setattr(sys, "executable", str(cell / "bin" / "python"))
    monkeypatch.setenv("PIP_TARGET", "/nowhere")
    env._pip_into(tmp_path / "home", "uv", tmp_path)
    words = (tmp_path / "said").read_text().split()
    wanted = Path(words[words.index("--requirement") + 1]).read_text()
    assert [pin.name for pin in locks.parse(wanted)] == ["uv"]
    assert {"--require-hashes", "--no-deps"} <= set(words)
    assert "PIP_TARGET" not in env._quiet()


def test_a_program_that_is_missing_or_fails_does_not_run(tmp_path: Path) -> None:
    """Neither is an error: the next candidate is asked."""
    assert env._runs((sys.executable, "-c", ""))
    assert not env._runs((sys.executable, "-c", "raise SystemExit(1)"))
    assert not env._runs((str(tmp_path / "none"),))


def _checkout(root: Path) -> Path:
    (root / "afd_plugin").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (root / name).write_bytes((env.ROOT / name).read_bytes())
    (root / "afd_plugin" / "__init__.py").write_text("def register() -> None: ...\n", encoding="utf-8")
    return root


def test_the_overlay_adds_its_own_checkout_to_a_cell_and_is_renewed_only_when_something_changed(
    tmp_path: Path,
) -> None:
    """Two checkouts over one cell import their own code; new metadata makes the overlay anew."""
    base = tmp_path / "cell"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base], check=True, timeout=60)
    packages = next((base / "lib").glob("python3.*")) / "site-packages"
    (packages / "real.pth").write_text(f"import site; site.addsitedir({str(SITE)!r})\n", encoding="utf-8")
    (base / env.MARKER).write_text("{}", encoding="utf-8")
    for name in ("one", "two"):
        checkout = _checkout(tmp_path / name)
        made = env.Environment(base, checkout / ".cell" / "x")
        assert env._refresh_overlay(made, checkout)
        assert not env._refresh_overlay(made, checkout)
        code = (
            "import afd_plugin, importlib.metadata as m; print(afd_plugin.__file__, m.version('afd-plugin'))"
        )
        done = subprocess.run(
            [made.python, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
        )
        assert done.stdout.split() == [str(checkout / "afd_plugin" / "__init__.py"), env.VLLM_VERSION]
    with (checkout / "pyproject.toml").open("a", encoding="utf-8") as metadata:
        metadata.write("# changed\n")
    assert env._refresh_overlay(made, checkout)


def test_the_cell_of_an_image_carries_nothing_of_the_moment_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No log and no duration, so that two images hold the same files; `--image` prints where it lies."""

    def install(cell: Path, lock_files: object, lock_descriptor: int) -> None:
        (cell / "install.log").write_text("took 3.1 s\n", encoding="utf-8")

    monkeypatch.setenv("AFD_ENV_DIR", str(tmp_path))
    monkeypatch.setattr(env, "NEEDED_BYTES", 0)
    monkeypatch.setattr(env, "verify", lambda python, expected: None)
    monkeypatch.setattr(env, "install_with_uv", install)
    assert env.main(["--image"]) == 0
    cell = Path(capsys.readouterr().out.splitlines()[-1])
    assert cell.parent == tmp_path
    assert not (cell / "install.log").exists()
    assert json.loads((cell / env.MARKER).read_text())["seconds"] == 0


def test_pruning_removes_every_cell_but_the_present_one_and_prints_its_interpreter_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells of earlier locks and other Pythons go; without the option nothing does."""
    present = env.Environment(tmp_path / "cpu-cp311-now", tmp_path / ".cell")
    old = [tmp_path / "cpu-cp311-before", tmp_path / "cpu-cp312-other"]
    for path in (present.cell, *old):
        path.mkdir()
    monkeypatch.setattr(env, "ensure", lambda: present)
    assert env.main([]) == 0
    assert all(path.is_dir() for path in old)
    assert env.main(["--prune"]) == 0
    assert [path for path in (present.cell, *old) if path.is_dir()] == [present.cell]
    assert capsys.readouterr().out.splitlines()[-1] == str(present.python)
    assert present.tool("ruff") == os.path.join(present.cell, "bin", "ruff")
