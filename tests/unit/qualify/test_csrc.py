# SPDX-License-Identifier: Apache-2.0
"""How the extension is built: which compiler is taken, what it is told, what is left behind. The compilers stand in."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from qualify import csrc


def _program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


COMPILE = 'while [ $# -gt 0 ]; do case "$1" in -o) shift; echo "$MADE" > "$1";; esac; shift; done'
"""A compiler that writes something to the file that `-o` names."""


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CUDA_HOME with an nvcc 13.0 that compiles nothing, its headers, and a g++ before the host's."""
    home = tmp_path / "cuda"
    _program(
        home / "bin" / "nvcc",
        f'[ "$1" = --version ] && {{ echo "Cuda compilation tools, release 13.0, V13.0.1"; exit; }}\n{COMPILE}',
    )
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    _program(tmp_path / "host" / "g++", COMPILE)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", f"{tmp_path}/host:/usr/bin:/bin")
    monkeypatch.setenv("MADE", "library")
    headers = tmp_path / "python"
    headers.mkdir()
    (headers / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(headers)})
    return home


def test_the_compiler_is_the_one_of_cuda_home_with_its_toolkit(toolkit: Path, tmp_path: Path) -> None:
    """Headers come from that toolkit, from this environment's torch and from this Python."""
    tools = csrc.find_tools()
    assert (tools.nvcc, tools.toolkit) == (toolkit / "bin" / "nvcc", toolkit)
    assert (tools.torch / "include").is_dir()
    assert tools.python_include == tmp_path / "python"


def test_a_wrapper_without_a_toolkit_is_passed_over(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvcc on the PATH that has no headers beside it is not the compiler; the next candidate is."""
    monkeypatch.delenv("CUDA_HOME")
    _program(tmp_path / "host" / "nvcc", "exit 1")
    monkeypatch.setattr(csrc, "find_spec", lambda _: None)
    monkeypatch.setattr(csrc, "INSTALLED", toolkit / "bin" / "nvcc")
    assert csrc._nvcc() == toolkit / "bin" / "nvcc"
    monkeypatch.setattr(csrc, "INSTALLED", tmp_path / "none")
    with pytest.raises(csrc.BuildError, match="No nvcc with its toolkit was found"):
        csrc._nvcc()


@pytest.mark.parametrize(
    ("version", "said"), [("release 12.9, V12", r"is 12\.9; .* nvcc 13\.0 only"), ("?", "an unknown release")]
)
def test_another_release_of_the_compiler_is_refused_by_name(toolkit: Path, version: str, said: str) -> None:
    """Machine code of another release would be another library."""
    _program(toolkit / "bin" / "nvcc", f"echo '{version}'")
    with pytest.raises(csrc.BuildError, match=said):
        csrc.find_tools()


def test_missing_headers_are_named(toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own, then torch's."""
    (tmp_path / "python" / "Python.h").unlink()
    with pytest.raises(csrc.BuildError, match=r"has no Python\.h"):
        csrc.find_tools()
    monkeypatch.setattr(csrc, "find_spec", lambda _: None)
    with pytest.raises(csrc.BuildError, match="torch is not installed"):
        csrc.find_tools()


def test_every_architecture_gets_machine_code_and_the_last_also_ptx(toolkit: Path, tmp_path: Path) -> None:
    """And both compilers are told to keep every name inside that is not exported, and no path of this checkout."""
    commands = csrc.commands(csrc.find_tools(), tmp_path / "work", (80, 90))
    words = commands[0]
    assert [word for word in words if word.startswith("-gencode")] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    assert not [word for command in commands for word in command if str(csrc.ROOT) in word]
    assert all("visibility=hidden" in " ".join(command) for command in commands[:2])
    assert not [word for word in commands[2] if re.search("rpath|runpath", word)]


def test_the_library_of_the_toolkit_is_linked_wherever_it_lies(toolkit: Path, tmp_path: Path) -> None:
    """A wheel has `lib`, an installed toolkit `lib64`."""
    (toolkit / "lib").mkdir()
    (toolkit / "lib" / "libcudart_static.a").touch()
    assert f"-L{toolkit / 'lib'}" in csrc.commands(csrc.find_tools(), tmp_path)[2]
    (toolkit / "lib64").mkdir()
    (toolkit / "lib64" / "libcudart_static.a").touch()
    assert f"-L{toolkit / 'lib64'}" in csrc.commands(csrc.find_tools(), tmp_path)[2]


def test_a_build_replaces_the_library_at_once_and_a_failed_one_leaves_the_old(
    toolkit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody ever loads half a file; the message is the compiler's own."""
    target = tmp_path / "out" / "_C.abi3.so"
    target.parent.mkdir()
    assert csrc.main(["build", "--output", str(target), "--architectures", "90"]) == 0
    assert target.read_text() == "library\n"
    assert csrc.digest(target) in capsys.readouterr().out
    _program(tmp_path / "host" / "g++", "echo 'ops.cpp:1: no such type' >&2; exit 1")
    assert csrc.main(["build", "--output", str(target)]) == 2
    assert "no such type" in capsys.readouterr().err
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_check_builds_twice_and_finds_a_build_that_differs(
    toolkit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal bytes pass; a compiler that writes the time does not."""
    target = tmp_path / "_C.abi3.so"
    assert csrc.main(["check", "--output", str(target)]) == 0
    assert "equal byte by byte" in capsys.readouterr().out
    _program(tmp_path / "host" / "g++", COMPILE.replace('"$MADE"', "$$"))
    assert csrc.main(["check", "--output", str(target)]) == 1
    assert "the build is not reproducible" in capsys.readouterr().err
