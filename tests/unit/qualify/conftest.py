# SPDX-License-Identifier: Apache-2.0
"""The gate's small project, as most tests of it start with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from qualify import chain, expected, sharding
from tests.unit.qualify.planted import NOXFILE, TESTS, WAITING, commit, git


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    (root / "tests" / "unit").mkdir(parents=True)
    (root / "qualify" / "cases").mkdir(parents=True)
    (root / "noxfile.py").write_text(NOXFILE)
    (root / "lint.py").write_text("print('fine')\n")
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-p no:cacheprovider'\n")
    (root / "tests" / "unit" / "test_a.py").write_text(TESTS)
    cases = {"tests/unit/test_a.py::test_one": 1, "tests/unit/test_a.py::test_two": 2}
    (root / "qualify" / "cases" / "unit.txt").write_text(expected.render(cases))
    (root / ".gitignore").write_text(".coverage*\n.gate/\n__pycache__/\n.nox/\n")
    git(tmp_path, "init", "-q", str(root))
    commit(root)
    # the gate's plugin comes from this checkout, everything else from the small project
    monkeypatch.setenv("PYTHONPATH", str(expected.ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("COVERAGE_PROCESS_START", raising=False)
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    return root


@pytest.fixture
def sharded(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project with every session up to e2e; the first of its two shards only waits."""
    names = ("package", "audit", "abi", "native_control")
    sessions = "".join(f"@nox.session\ndef {name}(session): pass\n" for name in names)
    e2e = (
        "@nox.session\ndef e2e(session): session.run('python', '-m', 'pytest', 'tests/e2e', external=True)\n"
    )
    (project / "noxfile.py").write_text(NOXFILE + sessions + e2e)
    (project / "tests" / "e2e").mkdir()
    cases = {WAITING: 1, "tests/e2e/test_a.py::test_b_works": 1}
    (project / "qualify" / "cases" / "e2e_all.txt").write_text(expected.render(cases))
    monkeypatch.setattr(sharding, "WAITING", frozenset({WAITING}))
    monkeypatch.setattr(chain, "SHARDS", 2)
    return project
