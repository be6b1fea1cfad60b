# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from qualify import package
from qualify.process import capture

NAMES = {"afd_plugin/__init__.py", "afd_plugin/py.typed", "qualify/x.py", "pyproject.toml", "docs/a.md"}


def test_the_wheel_holds_the_tracked_package_and_its_metadata_only() -> None:
    expected = package.expected_wheel(NAMES, "0.28.0")
    assert {name for name in expected if ".dist-info/" not in name} == {
        "afd_plugin/__init__.py",
        "afd_plugin/py.typed",
    }
    assert "afd_plugin-0.28.0.dist-info/entry_points.txt" in expected
    assert not [
        name for name in package.expected_sdist(NAMES, "0.28.0") if "qualify" in name or "docs" in name
    ]


def test_each_file_too_many_and_each_missing_is_named() -> None:
    assert package.differences({"a", "b"}, {"b", "c"}) == ("should not be there: a", "is missing: c")
    assert package.differences({"b"}, {"b"}) == ()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git checkout with this project's metadata and a package of two files."""
    root = tmp_path / "project"
    (root / "afd_plugin").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        (root / name).write_bytes((package.ROOT / name).read_bytes())
    (root / "afd_plugin" / "__init__.py").write_text("def register() -> None: ...\n")
    (root / "afd_plugin" / "py.typed").touch()
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, timeout=60)
    return root


def test_two_builds_give_the_same_bytes_and_exactly_the_tracked_files(project: Path, tmp_path: Path) -> None:
    out = package.build_twice(project, tmp_path / "scratch", 1_700_000_000)
    assert sorted(path.name for path in out.iterdir()) == [
        "afd_plugin-0.28.0-py3-none-any.whl",
        "afd_plugin-0.28.0.tar.gz",
    ]


def test_an_untracked_file_does_not_slip_in_and_a_stray_member_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "afd_plugin" / "secret.py").write_text("x = 1\n")
    out = package.build_twice(project, tmp_path / "scratch", 1_700_000_000)
    assert "afd_plugin/secret.py" not in package.members(out / "afd_plugin-0.28.0-py3-none-any.whl")
    real = package.expected_wheel
    monkeypatch.setattr(package, "expected_wheel", lambda n, v: real(n, v) - {"afd_plugin/py.typed"})
    with pytest.raises(package.PackageError, match=r"should not be there: afd_plugin/py\.typed"):
        package.build_twice(project, tmp_path / "again", 1_700_000_000)


def test_builds_that_differ_are_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = package.build
    monkeypatch.setattr(package, "build", lambda s, o, e: real(s, o, e + len(s.name)))
    with pytest.raises(package.PackageError, match="two builds of the same files differ"):
        package.build_twice(project, tmp_path / "scratch", 1_700_000_000)


def test_hashes_are_of_the_artifacts(project: Path, tmp_path: Path) -> None:
    hashes = package.build(project, tmp_path / "out", 1_700_000_000)
    for name, digest in hashes.items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize(
    ("planted", "said"),
    [("import torch", "loads"), ("__version__ = '0.27.0'", "AssertionError")],
)
def test_the_import_check_fails_for_a_package_that_loads_or_claims_too_much(
    planted: str, said: str, tmp_path: Path
) -> None:
    fake = tmp_path / "afd_plugin"
    fake.mkdir()
    body = f"__version__ = '0.28.0'\ndef register(): ...\n{planted}\n"
    (fake / "__init__.py").write_text(body)
    (tmp_path / "torch.py").touch()
    check = package.IMPORT_ALONE.format(heavy=package.HEAVY, version="0.28.0")
    done = capture([sys.executable, "-c", check], cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert said in done.stderr
