# SPDX-License-Identifier: Apache-2.0
"""Faults planted in clones of this checkout: the real chain, or one real session of it, refuses each by name.

`nox -s gate -- planted` runs all of it, half an hour; `-k alone` what takes minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = "qualify/cases/unit.txt"
VICTIM = "tests/unit/core/test_plan.py"
pytestmark = pytest.mark.timeout(2400)


@dataclass(frozen=True)
class Clone:
    """A clean clone of HEAD in which faults can be planted and the real gate runs."""

    root: Path

    def git(self, *words: str) -> None:
        """One git command in the clone."""
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(
            ["git", *identity, *words], cwd=self.root, check=True, capture_output=True, timeout=120
        )

    def plant(self, name: str, pattern: str, to: str) -> None:
        """Replace the first match of `pattern` in a file, and commit."""
        path = self.root / name
        text, count = re.subn(pattern, to, path.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
        assert count == 1, f"{name} has no {pattern!r} to plant a fault at"
        path.write_text(text, encoding="utf-8")
        self.git("commit", "-qam", "a fault")

    def gate(self, *options: str) -> tuple[int, str]:
        """Run the gate; its exit status and all that it printed."""
        words = [sys.executable, "-m", "qualify.gate", "--cell", "cpu", "--profile", "landing", *options]
        words += ["--evidence", str(self.root / "evidence")] if not options else []
        done = subprocess.run(words, cwd=self.root, capture_output=True, text=True, timeout=2400, check=False)
        return done.returncode, done.stdout + done.stderr

    def alone(self, session: str) -> tuple[int, str]:
        """Run one session alone, as the gate runs it."""
        return self.gate("--only", session, "--evidence", str(self.root.parent / "alone"))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """HEAD, without what is uncommitted here."""
    root = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root)], check=True, timeout=120)
    return Clone(root)


@pytest.mark.parametrize("session", ["lint", "docs"])
def test_alone_a_session_without_a_fault_passes(clone: Clone, session: str) -> None:
    """The controls of the two tests below."""
    status, said = clone.alone(session)
    assert status == 0, said
    assert f"{session}: PASS" in said


def test_alone_a_session_that_leaves_a_process_fails_and_the_process_is_ended(clone: Clone) -> None:
    """The process is named, and gone."""
    clone.plant(
        "qualify/lint/__main__.py",
        r'^if __name__ == "__main__":\n',
        'if __name__ == "__main__":\n    import subprocess\n\n'
        '    subprocess.Popen(["sleep", "4817"], start_new_session=True)\n',
    )
    status, said = clone.alone("lint")
    assert status == 1
    assert "left a process behind: sleep 4817" in said
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4817"]]


def test_alone_a_document_that_claims_more_than_the_evidence_is_refused(clone: Clone) -> None:
    """One word in the generated table, which is no part of the revision."""
    clone.plant("README.md", r"\| cpu \| [a-z ]+ \|", "| cpu | proven |")
    status, said = clone.alone("docs")
    assert status == 1
    assert "docs is FAIL" in said
    assert "README.md" in said


def test_alone_a_drifted_seam_is_refused(clone: Clone) -> None:
    """A seam whose recorded source is another than the installed one."""
    clone.plant("afd_plugin/seams/worker.py", r'sha256="[0-9a-f]{8}', 'sha256="00000000')
    status, said = clone.alone("audit")
    assert status == 1
    assert "is not the one this project was written against" in said


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("a changed lock", "another cell"),
        ("another torch", "torch: the cell says 2.12.1+cu130, this environment has 2.13.0"),
        ("a dirty tree", "dirty tree: stray.py"),
    ],
)
def test_alone_the_identity_blocks_before_anything_runs(clone: Clone, fault: str, word: str) -> None:
    """No session is started. That torch is not the cell's is planted in the cell: the torch that runs is real."""
    if fault == "a changed lock":
        clone.plant("containers/cpu/requirements.lock", r"\A", "# moved\n")
    elif fault == "another torch":
        clone.plant("containers/cells.toml", r'torch = "2\.13\.0', 'torch = "2.12.1')
    else:
        (clone.root / "stray.py").write_text("x = 1\n", encoding="utf-8")
    status, said = clone.gate()
    assert status == 1
    assert "FREEZE_IDENTITY is BLOCKED" in said
    assert word in said
    assert "lint: running" not in said


def _chain(clone: Clone) -> tuple[list[str], str]:
    """Run the whole chain to where it stops: the sessions that passed, and what was said."""
    started = time.monotonic()
    status, said = clone.gate()
    print(f"the chain took {time.monotonic() - started:.0f} s\n{said}")
    assert status == 1
    return re.findall(r"^(\w+): PASS", said, re.MULTILINE), said


def test_in_the_chain_a_case_deleted_with_its_line_is_refused_before_the_suite_runs(clone: Clone) -> None:
    """The list is compared with the one of the last release, or the first there was."""
    name = re.search(r"^def (test_\w+)", (clone.root / VICTIM).read_text(encoding="utf-8"), re.MULTILINE)
    assert name is not None
    clone.plant(VICTIM, rf"^def {name[1]}\(", f"def _{name[1]}(")
    clone.plant(CASES, rf"^{re.escape(VICTIM)}::{name[1]} \d+\n", "")
    passed, said = _chain(clone)
    assert passed == ["lint", "typecheck"]
    assert f"{VICTIM}::{name[1]} had" in said


@pytest.mark.parametrize(
    ("body", "word"), [("assert 1 == 2", "failed"), ('import pytest\n\n    pytest.skip("x")', "skipped")]
)
def test_in_the_chain_a_test_that_fails_or_is_skipped_is_refused(clone: Clone, body: str, word: str) -> None:
    """Even a listed one: the case is named with what became of it."""
    added = f"\n\ndef test_planted() -> None:\n    {body}\n"
    with (clone.root / VICTIM).open("a", encoding="utf-8") as victim:
        victim.write(added)
    clone.plant(CASES, rf"^(?={re.escape(VICTIM)})", f"{VICTIM}::test_planted 1\n")
    passed, said = _chain(clone)
    assert passed == ["lint", "typecheck"]
    assert f"{VICTIM}::test_planted: {word}" in said


def test_in_the_chain_a_drifted_seam_is_refused_before_anything_is_served(clone: Clone) -> None:
    """By the tests of the registry, which come before the audit; what the audit itself says of it is shown alone."""
    clone.plant("afd_plugin/seams/worker.py", r'sha256="[0-9a-f]{8}', 'sha256="00000000')
    passed, said = _chain(clone)
    assert passed == ["lint", "typecheck"]
    assert "tests/unit/audit/test_command.py::test_the_registry_holds_what_is_recorded" in said
