# SPDX-License-Identifier: Apache-2.0
"""What the gate's pytest plugin writes down of a run. The gate's own tests load it into real runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest

from qualify import collected
from qualify.collected import Collector, outcome
from qualify.expected import Run
from qualify.sharding import chosen

When = Literal["setup", "call", "teardown"]


def report(when: When, result: str, name: str = "t.py::a", **more: Any) -> pytest.TestReport:
    """One phase of a case, as pytest reports it."""
    return pytest.TestReport(name, ("t.py", 1, "a"), {}, result, None, when, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "word"),
    [
        (report("call", "passed"), "passed"),
        (report("call", "failed"), "failed"),
        (report("call", "skipped"), "skipped"),
        (report("setup", "failed"), "error"),
        (report("teardown", "failed"), "error"),
        (report("call", "skipped", wasxfail="x"), "xfailed"),
        (report("call", "passed", wasxfail="x"), "xpassed"),
    ],
)
def test_each_way_a_phase_can_end_has_its_word(phase: pytest.TestReport, word: str) -> None:
    """A fixture that fails is an error, and an expected failure is neither a pass nor a skip."""
    assert outcome(phase) == word


def test_the_worst_phase_of_a_case_is_its_outcome_and_what_broke_or_was_left_out_is_kept(
    tmp_path: Path,
) -> None:
    """A passed call does not hide a teardown that failed."""
    target = tmp_path / "cases.json"
    collector = Collector(target, "")
    items = [SimpleNamespace(nodeid=f"t.py::{name}") for name in "abc"]
    collector.pytest_deselected(items[2:])  # type: ignore[arg-type]
    collector.pytest_collection_finish(SimpleNamespace(items=items[:2]))  # type: ignore[arg-type]
    for passed in (True, False):
        collector.pytest_collectreport(SimpleNamespace(passed=passed, nodeid="u.py"))  # type: ignore[arg-type]
    for when in ("setup", "call", "teardown"):
        collector.pytest_runtest_logreport(report(when, "passed", "t.py::a"))  # type: ignore[arg-type]
        collector.pytest_runtest_logreport(
            report(when, "failed" if when == "teardown" else "passed", "t.py::b")  # type: ignore[arg-type]
        )
    collector.pytest_sessionfinish(1)
    assert msgspec.json.decode(target.read_bytes(), type=Run) == Run(
        collected=("t.py::a", "t.py::b"),
        deselected=("t.py::c",),
        broken=("u.py",),
        outcomes={"t.py::a": "passed", "t.py::b": "error"},
        exit_status=1,
    )


def test_a_shard_keeps_its_own_cases_and_names_the_others(tmp_path: Path) -> None:
    """Every case is in exactly one shard, and pytest is told which were left out."""
    everything = [f"t.py::test_{number}" for number in range(30)]
    kept: list[str] = []
    for shard in ("1/3", "2/3", "3/3"):
        told: list[Any] = []
        hook = SimpleNamespace(pytest_deselected=lambda items, told=told: told.extend(items))
        items = [SimpleNamespace(nodeid=name) for name in everything]
        collector = Collector(tmp_path / "x", shard)
        collector.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)  # type: ignore[arg-type]
        mine = [item.nodeid for item in items]
        assert set(mine) == chosen(everything, shard)
        assert mine == sorted(mine, key=everything.index), "in the order in which they were collected"
        assert sorted(mine + [item.nodeid for item in told]) == sorted(everything)
        kept += mine
    assert sorted(kept) == sorted(everything)


def test_a_pytest_that_a_test_starts_writes_over_nobodys_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is taken out of the environment, so a child of this run is not asked again."""
    registered: list[Any] = []
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(register=registered.append))
    monkeypatch.setenv(collected.CASES, str(tmp_path / "cases.json"))
    monkeypatch.setenv(collected.SHARD, "1/2")
    collected.pytest_configure(config)
    collected.pytest_configure(config)
    assert [type(plugin) for plugin in registered] == [Collector]
