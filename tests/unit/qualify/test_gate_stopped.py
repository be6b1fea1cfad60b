# SPDX-License-Identifier: Apache-2.0
"""A gate that is stopped or killed over a small real project, by real signals: what it leaves, and how it goes on."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from qualify import execution, expected, gate, ledger, revision, verify
from qualify.chain import Profile
from qualify.gate import Gate, Refused
from qualify.phases import Status
from tests.unit.qualify.planted import BESIDE, WAITING, commit, make, run, statuses

STOPPING = """
import os, pathlib, signal, time
def test_one(): assert {holds}
def test_two():
    if not pathlib.Path('.gate', 'resumed').exists():
        os.kill({gate}, signal.{name})
        time.sleep(60)
"""


@pytest.fixture(autouse=True)
def at_a_terminal() -> Iterator[None]:
    """The handlers of a process at a terminal: one in the background of a script ignores SIGINT, `nohup` SIGHUP."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def heeding(at_a_terminal: None) -> None:
    """The handlers that a gate has, for the test alone."""
    gate.heed_signals()


def stopped(root: Path, name: str, holds: bool, tests: str = STOPPING) -> None:
    """Run a qualifying chain whose unit tests stop it by a signal, the first of them with a failure or without."""
    text = tests.format(holds=holds, gate=os.getpid(), name=name)
    (root / "tests" / "unit" / "test_a.py").write_text(text)
    cases = {"tests/unit/test_a.py::test_one": 1, "tests/unit/test_a.py::test_two": 1}
    (root / "qualify" / "cases" / "unit.txt").write_text(expected.render(cases))
    (root / "qualify" / "cases" / "retired.txt").write_text(
        "tests/unit/test_a.py::test_two: no parameters here\n"
    )
    commit(root)
    opened = make(root, Profile.QUALIFYING)
    opened.open(())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        opened.run()


@pytest.mark.usefixtures("heeding")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_gate_that_is_stopped_leaves_a_record_of_what_ran_and_goes_on(project: Path, name: str) -> None:
    stopped(project, name, holds=True)
    last = ledger.read("cpu", project / "evidence")[-1].entry
    assert (last.session, last.status, last.cause) == ("unit", Status.FAIL, "interrupted")
    (project / ".gate" / "resumed").touch()
    assert run(project, Profile.QUALIFYING).startswith("package is BLOCKED")
    tried = [r.entry for r in ledger.read("cpu", project / "evidence") if r.entry.session == "unit"]
    assert [(one.attempt, one.status) for one in tried] == [(1, Status.FAIL), (2, Status.PASS)]


@pytest.mark.usefixtures("heeding")
def test_a_gate_under_nohup_does_not_heed_a_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    gate.heed_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_ctrl_c_is_one_line_and_the_status_of_a_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "load", interrupted)
    assert gate.main(["--cell", "cpu"]) == 130
    assert capsys.readouterr().err == "\ngate: stopped; the same command goes on from here\n"


def test_after_ctrl_c_a_session_has_time_to_write_down_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than what a gate waits for two parts that it ends; nox's own patience ends it before its record."""
    spec = importlib.util.spec_from_file_location("noxfile", expected.ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    given: list[float] = []
    session = SimpleNamespace(run=lambda *_, **options: given.append(options["interrupt_timeout"]))
    monkeypatch.setattr(
        noxfile.environment, "ensure", lambda **_: SimpleNamespace(python="python", variables=dict)
    )
    noxfile.Cell(session).python("-m", "qualify.gate")
    noxfile.Host(session).python("-m", "qualify.gate")
    assert min(given) >= 2 * 3 * execution.GRACE_S


def test_a_case_that_had_failed_when_the_gate_was_stopped_stands(project: Path) -> None:
    stopped(project, "SIGINT", holds=False)
    last = ledger.read("cpu", project / "evidence")[-1].entry
    assert (last.session, last.status, last.cause) == ("unit", Status.FAIL, None)
    (project / ".gate" / "resumed").touch()
    assert "unit failed at this revision" in run(project, Profile.QUALIFYING)


@pytest.mark.parametrize("holds", [False, True])
def test_a_case_that_had_failed_when_the_gate_was_killed_stands(
    project: Path, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is there without a record: what a kill leaves. A log without a failure is none."""
    with monkeypatch.context() as context:
        context.setattr(Gate, "_leave", lambda *_, **__: None)
        stopped(project, "SIGINT", holds)
    assert statuses(project)[-1] == ("typecheck", Status.PASS)
    (project / ".gate" / "resumed").touch()
    made = make(project)
    made.open(())
    with nullcontext() if holds else pytest.raises(Refused, match="test_one: failed"):
        made.run(until="unit")
    assert statuses(project)[-1][0] == "unit", "a landing chain has logs of its own"
    assert ("failed at this revision" in run(project, Profile.QUALIFYING)) is not holds
    stands = verify.standing(ledger.read("cpu", project / "evidence"), revision.revision(project))
    assert [entry.session for entry in stands] == ([] if holds else ["unit"])


GONE = """    while psutil.pid_exists(int(pathlib.Path('.gate', 'began').read_text())): time.sleep(0.05)
    time.sleep(1)
"""
FAILED = """    while not any('test_a.py F' in path.read_text() for path in pathlib.Path('.gate').rglob('log.txt')):
        time.sleep(0.05)
"""
STOPS = "    os.kill({}, signal.SIGINT); time.sleep(60)\n"


@pytest.mark.parametrize(
    ("waits", "when", "status", "cause"),
    [
        ("wait('other')", "", Status.FAIL, "interrupted"),
        ("assert n == 2; wait('other')", FAILED, Status.FAIL, None),
        ("pass", GONE, Status.PASS, None),
    ],
)
def test_what_ran_beside_a_gate_that_is_stopped_is_on_record_as_far_as_it_came(
    sharded: Path, waits: str, when: str, status: Status, cause: str | None
) -> None:
    """At work: interrupted, or failed where a case had failed by then. Over: as ever."""
    both = BESIDE.replace(
        "def test_a_waits():", "@pytest.mark.parametrize('n', [1, 2])\ndef test_a_waits(n):"
    )
    text = both.replace("getpid()", "getppid()").replace("wait('other')", waits, 1)
    imports = "import psutil, pytest, signal\n"
    (sharded / "tests" / "e2e" / "test_a.py").write_text(imports + text + when + STOPS.format(os.getpid()))
    cases = {WAITING: 2, "tests/e2e/test_a.py::test_b_works": 1}
    (sharded / "qualify" / "cases" / "e2e_all.txt").write_text(expected.render(cases))
    commit(sharded)
    opened = make(sharded, Profile.QUALIFYING)
    opened.open(())
    with pytest.raises(KeyboardInterrupt):
        opened.run()
    last = {r.entry.shard: r.entry for r in ledger.read("cpu", sharded / "evidence")[-2:]}
    assert (last["2/2"].status, last["2/2"].cause) == (Status.FAIL, "interrupted")
    assert (last["1/2"].status, last["1/2"].cause) == (status, cause)
