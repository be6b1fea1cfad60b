# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from qualify import environment as env
from qualify.process import CommandError, capture

OLD_GLIBC = env.Interpreter("CPython", (3, 12, 0), "linux-x86_64", ("glibc", "2.28"))
MUSL = env.Interpreter("CPython", (3, 12, 0), "linux-x86_64", ("", ""))
CPYTHON_311 = env.Interpreter("CPython", (3, 11, 7), "linux-x86_64")


def test_the_environment_module_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import qualify.environment\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= set(sys.stdlib_module_names) | {'qualify'}, new - set(sys.stdlib_module_names)"
    )
    capture([sys.executable, "-S", "-c", code], cwd=env.ROOT)


def test_one_key_per_lock_python_and_platform() -> None:
    keys = {
        env.cell_key("lock", CPYTHON_311),
        env.cell_key("other lock", CPYTHON_311),
        env.cell_key("lock", env.Interpreter("CPython", (3, 11, 8), "linux-x86_64")),
        env.cell_key("lock", env.Interpreter("CPython", (3, 12, 1), "linux-x86_64")),
        env.cell_key("lock", env.Interpreter("CPython", (3, 11, 7), "linux-aarch64")),
    }
    assert len(keys) == 5
    assert env.cell_key("lock", CPYTHON_311).startswith("cpu-cp311-")
    assert env.cell_key("lock", CPYTHON_311) == env.cell_key("lock", CPYTHON_311)


@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
def test_python_310_to_314_is_accepted(minor: int) -> None:
    env.Interpreter("CPython", (3, minor, 0), "linux-x86_64").check()


@pytest.mark.parametrize(
    ("interpreter", "said"),
    [
        (env.Interpreter("CPython", (3, 9, 18), "linux-x86_64"), "3.9.18.*3.10 to 3.14"),
        (env.Interpreter("CPython", (3, 15, 0), "linux-x86_64"), "3.15.0"),
        (env.Interpreter("PyPy", (3, 11, 0), "linux-x86_64"), "PyPy"),
        (env.Interpreter("CPython", (3, 12, 0), "macosx-14.0-arm64"), "runs on Linux only"),
        (OLD_GLIBC, "glibc 2.28; the cells"),
        (MUSL, "another C library"),
    ],
)
def test_an_interpreter_the_locks_do_not_fit_is_refused_by_name(
    interpreter: env.Interpreter, said: str
) -> None:
    with pytest.raises(env.SetupError, match=said):
        interpreter.check()


def test_the_place_of_cells_can_be_chosen(tmp_path: Path) -> None:
    assert env.cells_directory({"AFD_ENV_DIR": str(tmp_path)}) == tmp_path
    assert env.cells_directory({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/afd-plugin/envs")
    assert env.cells_directory({}) == Path.home() / ".cache" / "afd-plugin" / "envs"


def test_pip_check_must_print_exactly_the_expected_lines() -> None:
    expected = env.expected_pip_check(CPYTHON_311)
    printed = "\n".join(expected)
    assert len(expected) == 2
    assert env.check_complaints(printed, expected) == ()
    assert env.check_complaints(printed + "\nnumpy 1 requires x, which is not installed.", expected) == (
        "unexpected: numpy 1 requires x, which is not installed.",
    )
    assert env.check_complaints("No broken requirements found.", expected) == (
        "unexpected: No broken requirements found.",
        *(f"missing: {line}" for line in sorted(expected)),
    )


def test_the_wheels_own_python_gets_no_platform_line() -> None:
    wheels_own = env.Interpreter("CPython", (3, 12, 9), "linux-x86_64")
    assert env.expected_pip_check(wheels_own) == {env.TORCH_PIN_LINE}


def test_a_cell_that_pip_check_finds_wrong_never_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "NEEDED_BYTES", 0)
    monkeypatch.setattr(env, "install_with_uv", lambda cell, lock_files, lock_descriptor: None)
    with pytest.raises(env.SetupError, match="`pip check` does not print what it should"):
        env.ensure(checkout=tmp_path, cells=tmp_path / "cells")
    assert list((tmp_path / "cells").glob(f"cpu-*/{env.MARKER}")) == []


def test_this_environment_passes_its_own_pip_check_whatever_the_user_configured_for_pip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_QUIET", "1")
    monkeypatch.setenv("PIP_TARGET", "/nowhere")
    env.verify(Path(sys.executable), frozenset({env.TORCH_PIN_LINE}))
    with pytest.raises(env.SetupError, match="missing: a line that is not there"):
        env.verify(Path(sys.executable), frozenset({env.TORCH_PIN_LINE, "a line that is not there"}))


def test_a_killed_creation_is_never_trusted_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def killed(cell: Path, lock_files: object, lock_descriptor: int) -> None:
        made.append(cell)
        (cell / "half").touch()
        raise KeyboardInterrupt

    def whole(cell: Path, lock_files: object, lock_descriptor: int) -> None:
        made.append(cell)
        assert not (cell / "half").exists(), "the half environment was built upon"

    monkeypatch.setattr(env, "NEEDED_BYTES", 0)
    monkeypatch.setattr(env, "verify", lambda python, expected: None)
    monkeypatch.setattr(env, "_refresh_overlay", lambda environment, checkout: False)
    monkeypatch.setattr(env, "install_with_uv", killed)
    with pytest.raises(KeyboardInterrupt):
        env.ensure(checkout=tmp_path, cells=tmp_path / "cells")
    cell = made[0]
    assert cell.is_dir()
    assert not (cell / env.MARKER).exists()
    monkeypatch.setattr(env, "install_with_uv", whole)
    env.ensure(checkout=tmp_path, cells=tmp_path / "cells")
    assert json.loads((cell / env.MARKER).read_text())["seconds"] >= 0
    env.ensure(checkout=tmp_path, cells=tmp_path / "cells")
    assert made == [cell, cell], "a finished environment is used again as it is"
    (cell / "bin" / "python").unlink()
    env.ensure(checkout=tmp_path, cells=tmp_path / "cells")
    assert made == [cell, cell, cell], "an environment whose interpreter is gone is made again"


def test_pip_takes_over_when_uv_fails_and_both_reasons_are_told_when_it_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(cell: Path, lock_files: object, lock_descriptor: int) -> None:
        raise CommandError("no route to an index")

    def works(cell: Path, lock_files: object, lock_descriptor: int) -> None:
        return None

    works.__name__ = "install_with_pip"
    fails.__name__ = "install_with_uv"
    monkeypatch.setattr(env, "NEEDED_BYTES", 0)
    monkeypatch.setattr(env, "verify", lambda python, expected: None)
    monkeypatch.setattr(env, "_refresh_overlay", lambda environment, checkout: False)
    monkeypatch.setattr(env, "install_with_uv", fails)
    monkeypatch.setattr(env, "install_with_pip", works)
    cell = env.ensure(checkout=tmp_path, cells=tmp_path / "one").cell
    assert json.loads((cell / env.MARKER).read_text())["installer"] == "install_with_pip"
    assert "install_with_uv did not work (no route to an index)" in capsys.readouterr().out
    monkeypatch.setattr(env, "install_with_pip", fails)
    with pytest.raises(env.SetupError, match=r"(?s)no installer.*no route.*no route"):
        env.ensure(checkout=tmp_path, cells=tmp_path / "two")


def test_too_little_disk_is_told_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "NEEDED_BYTES", 2**60)
    with pytest.raises(env.SetupError, match="AFD_ENV_DIR"):
        env.ensure(checkout=tmp_path, cells=tmp_path / "cells")


def test_a_lock_held_elsewhere_is_waited_for_with_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "cell.lock"
    with path.open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with (
            pytest.raises(env.SetupError, match=r"another process has held .*cell\.lock"),
            env.locked(path, 0.0),
        ):
            pytest.fail("the lock was taken twice")
    with env.locked(path, 0.0) as descriptor:
        assert descriptor > 2


def test_a_child_that_inherits_the_lock_keeps_it_when_its_parent_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "cell.lock"
    with env.locked(path, 0.0) as descriptor:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor]
        )
    try:
        with pytest.raises(env.SetupError, match="another process"), env.locked(path, 0.0):
            pytest.fail("the installer's lock was lost")
    finally:
        child.communicate(b"\n", timeout=30)
    with env.locked(path, 5.0):
        pass


def test_a_childs_environment_leaks_no_other_python_and_lets_the_caller_decide() -> None:
    made = env.Environment(Path("/cell"), Path("/overlay"))
    variables = made.variables(
        {"PATH": "/bin", "PYTHONPATH": "/x", "VLLM_CPU_KVCACHE_SPACE": "4", "HOME": "/h"}
    )
    assert "PYTHONPATH" not in variables
    assert variables["PATH"] == "/overlay/bin:/cell/bin:/bin"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert variables["VLLM_TARGET_DEVICE"] == "cpu"
    assert variables["HOME"] == "/h"


def test_stale_cells_are_all_but_the_present_one(tmp_path: Path) -> None:
    for name in ("cpu-cp311-aaa", "cpu-cp312-bbb", "uv-ccc"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpu-cp311-aaa.lock").touch()
    assert env.stale(tmp_path, tmp_path / "cpu-cp312-bbb") == (tmp_path / "cpu-cp311-aaa",)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "below" / "marker"
    env.write_atomically(target, "one")
    env.write_atomically(target, "two")
    assert target.read_text() == "two"
    assert [path.name for path in target.parent.iterdir()] == ["marker"]
