# SPDX-License-Identifier: Apache-2.0
"""A small real project for the gate to run over, in which a test plants its faults."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from qualify import gate, ledger, revision
from qualify.cells import load
from qualify.chain import Profile
from qualify.gate import Gate, Refused
from qualify.identity import Binding
from qualify.phases import Status

NOXFILE = """
import nox
nox.options.default_venv_backend = "none"
@nox.session
def lint(session): session.run("python", "lint.py", external=True)
@nox.session
def typecheck(session): pass
@nox.session
def unit(session): session.run("python", "-m", "pytest", "-q", "tests/unit", external=True)
"""
TESTS = "import pytest\ndef test_one(): pass\n@pytest.mark.parametrize('x', [1, 2])\ndef test_two(x): pass\n"


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, timeout=60)


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "-qm", "state")


def make(root: Path, profile: Profile = Profile.LANDING, environment: str = "environment") -> Gate:
    binding = Binding("cpu", "lock", revision.revision(root), environment)
    return Gate(load("cpu"), profile, binding, gate.known_sessions(root), "host a", root, root / "evidence")


def run(root: Path, profile: Profile = Profile.LANDING, environment: str = "environment") -> str:
    """Run the chain to where it stops, and say why."""
    opened = make(root, profile, environment)
    opened.open(())
    with pytest.raises(Refused) as refused:
        opened.run()
    return str(refused.value)


def statuses(root: Path) -> list[tuple[str, Status]]:
    return [(r.entry.session, r.entry.status) for r in ledger.read("cpu", root / "evidence")]


WAITING = "tests/e2e/test_a.py::test_a_waits"
BESIDE = """
import os, pathlib, time
def wait(name):
    end = time.monotonic() + 60
    while not pathlib.Path('.gate', name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.05)
def test_a_waits():
    pathlib.Path('.gate', 'began').write_text(str(os.getpid()))
    wait('other')
def test_b_works():
    wait('began')
"""
