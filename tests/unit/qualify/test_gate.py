# SPDX-License-Identifier: Apache-2.0
"""The gate over a small real project: real nox, real pytest, real git, real processes; faults are planted in it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from qualify import chain, expected, gate, ledger, verify
from qualify.cells import load
from qualify.chain import SHARDS, Profile, gpu_free, infrastructure, parts
from qualify.gate import Refused
from qualify.phases import Status
from tests.unit.qualify.planted import BESIDE, TESTS, commit, make, run, statuses


def test_the_chain_runs_in_order_counts_cases_and_is_blocked_where_a_session_is_missing(
    project: Path,
) -> None:
    assert run(project) == "package is BLOCKED: there is no session package yet"
    assert statuses(project) == [
        ("", Status.PASS),
        ("lint", Status.PASS),
        ("typecheck", Status.PASS),
        ("unit", Status.PASS),
        ("package", Status.BLOCKED),
    ]
    unit = ledger.read("cpu", project / "evidence")[3].entry
    assert unit.counts == ledger.Counts(collected=3, passed=3, failed=0, error=0, skipped=0, xfailed=0)
    assert unit.command == ("python", "-m", "nox", "-s", "unit")
    assert unit.teardown.clean


def test_a_chain_goes_on_where_it_stopped_and_anew_at_another_revision(project: Path) -> None:
    run(project)
    run(project)
    assert [name for name, _ in statuses(project)][5:] == ["", "package"]
    (project / "lint.py").write_text("print('other')\n")
    commit(project)
    run(project)
    assert [name for name, _ in statuses(project)][7:] == ["", "lint", "typecheck", "unit", "package"]


def test_a_chain_may_be_run_in_pieces_and_each_goes_on_after_the_one_before(project: Path) -> None:
    first = make(project)
    first.open(())
    first.run(until="typecheck")
    assert [name for name, _ in statuses(project)] == ["", "lint", "typecheck"]
    assert ledger.read("cpu", project / "evidence")[-1].entry.next_allowed_action == "unit"
    run(project)
    assert [name for name, _ in statuses(project)][3:] == ["", "unit", "package"]
    with pytest.raises(Refused, match="has no session party"):
        make(project).run(until="party")


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (TESTS + "def test_bad(): assert False\n", "test_a.py::test_bad: failed"),
        (TESTS.replace("test_one(): pass", "test_one(): pytest.skip('x')"), "test_a.py::test_one: skipped"),
        (TESTS.replace("test_one(): pass", "test_one(): pytest.xfail('x')"), "test_a.py::test_one: xfailed"),
        (TESTS.replace("def test_one(): pass\n", ""), "test_one: 1 cases are expected, 0 were collected"),
        (TESTS.replace("[1, 2]", "[1]"), "test_two: 2 cases are expected, 1 were collected"),
        (TESTS + "def test_new(): pass\n", "test_new: 1 cases, the list has 0"),
        (TESTS + "def test_e(nothing): pass\n", "test_a.py::test_e: error"),
        ("import nothing_of_this_name\n" + TESTS, "test_a.py could not be collected"),
    ],
)
def test_a_suite_passes_only_whole(project: Path, tests: str, said: str) -> None:
    (project / "tests" / "unit" / "test_a.py").write_text(tests)
    commit(project)
    assert said in run(project)
    assert statuses(project)[-1] == ("unit", Status.FAIL)


def test_a_case_deleted_with_its_line_in_the_list_is_found(project: Path) -> None:
    (project / "tests" / "unit" / "test_a.py").write_text(TESTS.replace("def test_one(): pass\n", ""))
    path = project / "qualify" / "cases" / "unit.txt"
    path.write_text(expected.render({"tests/unit/test_a.py::test_two": 2}))
    commit(project)
    assert "test_one had 1 cases and has 0; say why in qualify/cases/retired.txt" in run(project)
    (path.parent / "retired.txt").write_text(
        "tests/unit/test_a.py::test_one: replaced by test_two's parameters\n"
    )
    commit(project)
    assert run(project).startswith("package is BLOCKED")


def test_a_process_left_behind_fails_the_session_and_is_ended(project: Path) -> None:
    leak = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'],"
    (project / "lint.py").write_text(leak + " start_new_session=True, stdout=subprocess.DEVNULL)\n")
    commit(project)
    assert "lint is FAIL:\n  left a process behind: python" in run(project)
    left = ledger.read("cpu", project / "evidence")[-1].entry.teardown.processes
    assert len(left) == 1


def test_a_process_left_behind_that_overwrote_its_environment_is_found_by_its_descent(project: Path) -> None:
    """As vLLM's workers do with their titles."""
    (project / "lint.py").write_text(
        "import os, subprocess, sys, time\n"
        "bare = {'PATH': os.environ['PATH'], 'LEFT': 'yes'}\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], env=bare, start_new_session=True,\n"
        "    stdout=subprocess.DEVNULL)\n"
        "time.sleep(3)\n"
    )
    commit(project)
    assert "lint is FAIL:\n  left a process behind: python" in run(project)


def test_a_session_that_changes_the_tree_fails(project: Path) -> None:
    (project / "lint.py").write_text("open('noxfile.py', 'a').write('# more\\n')\n")
    commit(project)
    assert "noxfile.py changed while the session ran" in run(project)


def test_a_failure_may_be_run_again_when_landing_and_stands_when_qualifying(project: Path) -> None:
    (project / "lint.py").write_text("raise SystemExit(3)\n")
    commit(project)
    assert "`nox -s lint` exited with 1" in run(project)
    run(project)
    assert ledger.read("cpu", project / "evidence")[-1].entry.attempt == 2
    run(project, Profile.QUALIFYING)
    assert "that stands until the revision is another" in run(project, Profile.QUALIFYING)


def test_a_qualifying_failure_stands_in_another_environment_before_anything_runs_there(
    project: Path,
) -> None:
    (project / "lint.py").write_text(
        "import pathlib, sys\nsys.exit(not pathlib.Path('.gate/mended').exists())\n"
    )
    commit(project)
    run(project, Profile.QUALIFYING)
    (project / ".gate" / "mended").touch()
    assert "lint failed at this revision" in run(project, Profile.QUALIFYING, "another environment")
    assert statuses(project) == [("", Status.PASS), ("lint", Status.FAIL), ("", Status.PASS)]
    assert run(project, Profile.LANDING, "another environment").startswith("package is BLOCKED")


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        # named, because pytest prints the names of slow cases, and a gate searches its log for these words
        pytest.param("sys.exit('OSError: [Errno 28] No space left on device')", "disk-full", id="disk"),
        pytest.param("os.kill(os.getpid(), 15)", "interrupted", id="signal"),
    ],
)
def test_a_named_infrastructure_fault_is_tried_again_and_every_attempt_is_on_record(
    project: Path, ending: str, cause: str
) -> None:
    once = "import os, pathlib, sys\np = pathlib.Path('.gate/tried')\nif not p.exists():\n p.touch()\n"
    (project / "lint.py").write_text(f"{once} {ending}\n")
    commit(project)
    assert run(project).startswith("package is BLOCKED")
    tried = [r.entry for r in ledger.read("cpu", project / "evidence") if r.entry.session == "lint"]
    assert [(e.attempt, e.status, e.cause) for e in tried] == [
        (1, Status.FAIL, cause),
        (2, Status.PASS, None),
    ]


def test_a_shard_that_only_waits_runs_beside_the_next_and_is_concluded_before_another_session(
    sharded: Path,
) -> None:
    works = BESIDE + "    pathlib.Path('.gate', 'other').touch()\n"
    (sharded / "tests" / "e2e" / "test_a.py").write_text(works)
    commit(sharded)
    assert run(sharded, Profile.QUALIFYING).startswith("accuracy is BLOCKED")
    entries = [record.entry for record in ledger.read("cpu", sharded / "evidence")][8:]
    assert [(one.session, one.shard, one.status) for one in entries] == [
        ("e2e", "2/2", Status.PASS),
        ("e2e", "1/2", Status.PASS),
        ("accuracy", "", Status.BLOCKED),
    ]
    shards = [part for part in parts(load("cpu"), Profile.QUALIFYING) if part.session == "e2e"]
    cases = {"e2e_all": expected.listed("e2e_all", sharded)}
    assert verify.lacking(entries[:2], shards, cases) == ()


def test_a_waiting_shard_that_is_over_is_on_record_before_the_next_begins(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an interruption of a later shard does not lose it."""
    monkeypatch.setattr(chain, "SHARDS", 3)
    gone = "    while psutil.pid_exists(int(pathlib.Path('.gate', 'began').read_text())): time.sleep(0.05)\n"
    tests = BESIDE.replace("getpid()", "getppid()").replace("wait('other')", "pass") + gone
    (sharded / "tests" / "e2e" / "test_a.py").write_text(f"import psutil\n{tests}def test_c_works(): pass\n")
    cases = {f"tests/e2e/test_a.py::test_{name}": 1 for name in ("a_waits", "b_works", "c_works")}
    (sharded / "qualify" / "cases" / "e2e_all.txt").write_text(expected.render(cases))
    commit(sharded)
    assert run(sharded, Profile.QUALIFYING).startswith("accuracy is BLOCKED")
    shards = [record.entry.shard for record in ledger.read("cpu", sharded / "evidence")][8:-1]
    assert shards == ["2/3", "1/3", "3/3"]


def test_a_failure_ends_what_runs_beside_it_without_a_record(sharded: Path) -> None:
    (sharded / "tests" / "e2e" / "test_a.py").write_text(BESIDE + "    raise AssertionError\n")
    commit(sharded)
    assert "test_b_works: failed" in run(sharded, Profile.QUALIFYING)
    assert statuses(sharded)[8:] == [("e2e", Status.FAIL)]
    assert not psutil.pid_exists(int((sharded / ".gate" / "began").read_text()))


def test_a_waiting_shard_has_no_attempt_more_than_another(sharded: Path) -> None:
    (sharded / "tests" / "e2e" / "test_a.py").write_text(
        "def test_a_waits(): pass\ndef test_b_works(): pass\n"
    )
    full = "import os, sys; sys.exit(os.environ['AFD_GATE_SHARD'] == '1/2' and 'OSError: [Errno 28]')"
    noxfile = (sharded / "noxfile.py").read_text()
    call = "session.run('python', '-m', 'pytest', 'tests/e2e'"
    (sharded / "noxfile.py").write_text(
        noxfile.replace(call, f"session.run('python', '-c', {full!r}, external=True); {call}")
    )
    commit(sharded)
    for _ in range(2):
        assert "e2e 1/2 is FAIL after 3 attempts" in run(sharded, Profile.QUALIFYING)
    tried = [r.entry for r in ledger.read("cpu", sharded / "evidence") if r.entry.shard == "1/2"]
    assert [one.cause for one in tried] == ["disk-full"] * 3


def test_an_infrastructure_fault_is_tried_three_times_in_all_however_often_the_gate_is_called(
    project: Path,
) -> None:
    (project / "lint.py").write_text("import sys\nsys.exit('OSError: [Errno 28] No space left on device')\n")
    commit(project)
    for _ in range(2):
        assert "after 3 attempts" in run(project, Profile.QUALIFYING)
    assert statuses(project) == [("", Status.PASS), *[("lint", Status.FAIL)] * 3, ("", Status.PASS)]


def test_an_identity_that_is_not_the_cells_blocks_before_anything_runs(project: Path) -> None:
    with pytest.raises(Refused, match="FREEZE_IDENTITY is BLOCKED"):
        make(project).open(["torch: the cell says 2.13.0, this environment has 2.12.0"])
    assert statuses(project) == [("", Status.BLOCKED)]


def test_infrastructure_faults_belong_to_their_sessions() -> None:
    assert infrastructure("package", "ReadTimeoutError(...)") == "index-unreachable"
    assert infrastructure("unit", "ReadTimeoutError(...)") is None
    assert infrastructure("unit", "AssertionError") is None
    ended = "nox > Command python -m pytest tests/e2e failed with exit code -15\n"
    assert infrastructure("e2e", f"tests/e2e/test_a.py ..s.\n{ended}") == "interrupted"
    assert infrastructure("e2e", f"tests/e2e/test_a.py ..s.{ended}") == "interrupted", "in the same line"
    assert infrastructure("e2e", f"tests/e2e/test_a.py ..F.\n{ended}") is None, "a case had failed before"
    assert infrastructure("unit", "nox > Command pytest failed with exit code 1") is None


def test_the_qualifying_chain_runs_the_full_scope_in_shards_and_a_gpu_cell_its_own_suite() -> None:
    full = [part.title for part in parts(load("cpu"), Profile.QUALIFYING)]
    assert full == [
        "lint", "typecheck", "unit", "package", "audit", "abi", "native_control",
        *(f"e2e {shard}/{SHARDS}" for shard in range(1, SHARDS + 1)), "accuracy", "docs", "final_audit",
    ]  # fmt: skip
    assert [p.title for p in parts(load("cpu"), Profile.LANDING)][7] == "e2e"
    on_a_gpu = [part.title for part in parts(load("h200x1"), Profile.LANDING)]
    assert on_a_gpu == ["native_control", "gpu_e2e", "accuracy", "final_audit"]
    left = [part.title for part in gpu_free(load("h200x1"))]
    assert [*left[:-1], *full[6:-2], left[-1], full[-1]] == full, "the two chains together leave nothing out"
    assert not gpu_free(load("cpu"))


def test_this_noxfiles_sessions_are_known() -> None:
    assert {"lint", "unit", "gate", "final_audit", "abi"} <= gate.known_sessions()
