# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from qualify import docs, execution, expected, gate
from qualify.cells import load
from qualify.chain import Part
from qualify.phases import Phase
from qualify.process import CommandError


def test_lists_are_written_from_what_pytest_collects_and_changes_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "qualify").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    test = tmp_path / "tests" / "test_a.py"
    test.write_text("import pytest\n@pytest.mark.parametrize('x', ['/a', 'b'])\ndef test_two(x): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(expected.ROOT))
    monkeypatch.setattr(expected, "clean_environment", lambda: {**__import__("os").environ})
    monkeypatch.setattr(expected, "ROOT", tmp_path)
    monkeypatch.setitem(expected.SUITES, "unit", ("tests",))
    real = expected.collect
    monkeypatch.setattr(expected, "collect", lambda suite: real(suite, tmp_path))
    monkeypatch.setattr(expected, "listed", lambda suite: {"tests/test_a.py::test_old": 1})
    assert expected.main(["unit"]) == 0
    assert (tmp_path / "qualify" / "cases" / "unit.txt").read_text() == "tests/test_a.py::test_two 2\n"
    assert capsys.readouterr().out == (
        "unit: 2 cases of 1 functions\n  tests/test_a.py::test_old: 1 -> 0\n  tests/test_a.py::test_two: 0 -> 2\n"
    )


def test_a_list_that_is_missing_is_a_fault(tmp_path: Path) -> None:
    assert "names no case" in expected.check_list("unit", tmp_path)[0]


@pytest.mark.parametrize("suite", expected.SUITES)
def test_no_suite_has_lost_a_case_without_a_reason(suite: str) -> None:
    """Of every suite, those of a GPU's chain, too: on its host it would be found when the host's time is spent."""
    assert expected.check_list(suite) == ()


def test_the_worst_of_setup_call_and_teardown_is_a_cases_outcome() -> None:
    run = expected.Run(collected=("a::b",), outcomes={"a::b": "error"}, exit_status=1)
    assert expected.complaints(run, {"a::b": 1}) == ("a::b: error",)
    fine = expected.Run(collected=("a::b",), outcomes={"a::b": "passed"}, exit_status=1)
    assert expected.complaints(fine, {"a::b": 1}) == ("pytest exited with 1",)
    assert expected.complaints(expected.Run(collected=("a::b",), exit_status=0), {"a::b": 1}) == (
        "a::b: not run",
    )


def test_a_part_past_its_limit_is_ended_whole(tmp_path: Path) -> None:
    (tmp_path / "noxfile.py").write_text(
        "import nox, os\nnox.options.default_venv_backend = 'none'\n@nox.session\n"
        "def lint(session): session.run('python', '-c', 'import time; time.sleep(300)', external=True)\n"
    )
    with execution.Running(Part("lint", Phase.STATIC_AND_UNIT_GATE), tmp_path / "log", tmp_path) as running:
        outcome = running.outcome(8.0)
    assert outcome.status is None
    assert outcome.seconds < 60


def test_a_sessions_metrics_reach_the_record(tmp_path: Path) -> None:
    (tmp_path / "noxfile.py").write_text(
        "import json, nox, os\n@nox.session(venv_backend='none')\ndef lint(session):\n"
        f"    json.dump({{'seconds': 1.5}}, open(os.environ['{execution.METRICS}'], 'w'))\n"
    )
    with execution.Running(Part("lint", Phase.STATIC_AND_UNIT_GATE), tmp_path / "log", tmp_path) as running:
        outcome = running.outcome(60.0)
    assert (outcome.status, outcome.metrics) == (0, {"seconds": 1.5})
    assert outcome.run is None


def test_shared_memory_that_a_living_process_holds_is_not_a_leftover(tmp_path: Path) -> None:
    name = "afd-test-" + tmp_path.name
    path = execution._SHARED / name
    path.write_bytes(b"x")
    try:
        assert execution._orphans({name}) == {name}
        with path.open("rb"):
            assert execution._orphans({name}) == set()
        removal = threading.Timer(0.5, path.unlink)
        removal.start()
        assert execution._left({name}) == set(), "what its tracker removes within the grace is no leftover"
        removal.join(5)
    finally:
        path.unlink(missing_ok=True)


def test_shared_memory_that_nobody_removes_is_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "GRACE_S", 0.5)
    path = execution._SHARED / f"afd-test-{tmp_path.name}"
    path.write_bytes(b"x")
    try:
        assert execution._left({path.name}) == {path.name}
    finally:
        path.unlink()


def test_options_for_pytest_of_the_callers_do_not_reach_a_part(tmp_path: Path) -> None:
    part = Part("unit", Phase.STATIC_AND_UNIT_GATE, "unit", "1/2")
    base = {"PYTEST_ADDOPTS": "-k nothing", "HOME": "h", "AFD_ENV_DIR": "e", "AFD_E2E_IDLE_S": "1"}
    made = execution.variables(base, tmp_path, part, "m")
    assert (made["HOME"], made["AFD_ENV_DIR"]) == ("h", "e")
    assert "AFD_E2E_IDLE_S" not in made, "a gate's cases are as long as they are written"
    assert made["PYTEST_ADDOPTS"] == "-p qualify.collected"
    assert (made["HOME"], made["AFD_GATE_SHARD"]) == ("h", "1/2")


def test_the_command_line_refuses_what_it_cannot_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert gate.main(["--cell", "tpu"]) == 2
    seen = __import__("qualify.identity", fromlist=["x"]).observe()
    other = msgspec.structs.replace(seen, torch="2.12.0")
    monkeypatch.setattr(gate.identity, "observe", lambda: other)
    arguments = ["--cell", "cpu", "--profile", "landing", "--evidence", str(tmp_path)]
    assert gate.main(arguments) == 1
    said = capsys.readouterr().err
    assert "FREEZE_IDENTITY is BLOCKED" in said
    assert "torch: the cell says" in said


def test_a_whole_chain_ends_with_its_head(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gate.Gate, "open", lambda self, faults: None)
    monkeypatch.setattr(gate.Gate, "run", lambda self, only="", until="": None)
    for whole, code in ((True, 0), (False, 1)):
        verdict = gate.verify.Verdict("head", (), () if whole else ("lint: no record",))
        monkeypatch.setattr(gate.verify, "verify", lambda *a, v=verdict, **k: v)
        assert gate.main(["--cell", "cpu", "--evidence", str(tmp_path)]) == code
    assert gate.main(["--cell", "cpu", "--evidence", str(tmp_path), "--until", "unit"]) == 0
    said = capsys.readouterr().out
    assert said.count("gate on cpu (qualifying): ") == 2, "a piece of a chain has no verdict"
    assert "gate on cpu (qualifying): PASS" in said
    assert "lint: no record\ngate on cpu (qualifying): not complete" in said


def test_the_documents_command_writes_checks_and_fails_on_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "write", lambda: ("README.md",))
    assert docs.main(["--write"]) == 0
    monkeypatch.setattr(docs, "check", list)
    assert docs.main([]) == 0
    monkeypatch.setattr(docs, "check", lambda: ["README.md:1: stale"])
    assert docs.main([]) == 1
    assert "1 findings" in capsys.readouterr().out

    def broken() -> list[object]:
        raise CommandError("git is not here")

    monkeypatch.setattr(docs, "check", broken)
    assert docs.main([]) == 2
    assert load("cpu").name == "cpu"
