# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate of a GPU cell: what of a run enters the ledger, and where it does not start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qualify.accuracy import gate
from qualify.gpu import accuracy_gate
from qualify.gpu.host import Host

DESCRIBED = {
    "rows": 1600, "native": 0.9, "afd": 0.89, "lost": 17, "won": 1, "p_value": 0.0001,
    "differing": {"sort": 20, "copy": 2}, "smallest_visible_drop": 0.0061,
}  # fmt: skip


def result(passed: bool) -> dict[str, Any]:
    """What a run of `qualify.gpu.accuracy` returns, in small."""
    side = {"scored": 1600, "right": 1440, "results_sha256": "r" * 64, "samples_sha256": "s" * 64}
    return {
        "questions": {"m": "q" * 64},
        "sides": {"m-eager-native": side, "m-eager-1a1f": {"error": "not run"}},
        "comparisons": {"m-eager-1a1f": DESCRIBED},
        "metrics": {"m-eager-1a1f_p_value": 0.0001, "m-eager-1a1f_differing": 22},
        "faults": [] if passed else ["m-eager-1a1f: AFD lost 17 rows and won 1"],
        "passed": passed,
    }


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mapping[str, Any]:
    """A host that is the cell and answers with `outcome`; nothing of a GPU is touched."""
    world: dict[str, Any] = {"outcome": result(passed=True), "e2e": [], "settings": []}

    def measured(on: Host) -> dict[str, Any]:
        world["settings"].append(dict(on.settings))
        return world["outcome"]

    monkeypatch.setattr(accuracy_gate, "refusal", lambda cell: None)
    monkeypatch.setattr(accuracy_gate.accuracy, "accuracy", measured)
    monkeypatch.setattr(accuracy_gate, "require_e2e", lambda cell, place: world["e2e"].append(cell.name))
    monkeypatch.setenv(gate.METRICS, str(tmp_path / "metrics.json"))
    monkeypatch.setenv(gate.DIGESTS, str(tmp_path / "digests.json"))
    world["words"] = ["--cell", "h200x1", "--output", str(tmp_path / "out")]
    return world


def test_a_run_that_passed_hands_scores_p_values_and_digests_to_the_ledger(
    host: Mapping[str, Any], tmp_path: Path
) -> None:
    assert accuracy_gate.main(host["words"]) == 0
    assert host["e2e"] == ["h200x1"], "only after the end-to-end gate"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["m-eager-native_right"] == 1440
    assert (metrics["m-eager-1a1f_p_value"], metrics["m-eager-1a1f_differing"]) == (0.0001, 22)
    assert "m-eager-1a1f_scored" not in metrics, "a side without answers has no score"
    digests = json.loads((tmp_path / "digests.json").read_text())
    (account,) = (tmp_path / "out").glob("*/accuracy.json")
    assert digests["account"] == hashlib.sha256(account.read_bytes()).hexdigest()
    assert digests["m_questions"] == "q" * 64
    assert digests["m-eager-native_samples"] == "s" * 64


def test_a_run_with_a_fault_fails_and_says_it(
    host: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    host["outcome"] = result(passed=False)
    assert accuracy_gate.main(host["words"]) == 1
    assert "accuracy: FAIL\n  m-eager-1a1f: AFD lost 17 rows" in capsys.readouterr().out


@pytest.mark.parametrize("limited", [["--rows", "20"], ["--diagnostic"]])
def test_what_is_limited_or_came_before_its_gate_is_a_diagnosis_whatever_it_finds(
    host: Mapping[str, Any], limited: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy_gate.main([*host["words"], *limited]) == gate.DIAGNOSTIC
    assert host["e2e"] == []
    assert host["settings"] == [{"rows": 20} if "--rows" in limited else {}]
    assert "DIAGNOSTIC, not evidence" in capsys.readouterr().out


def test_without_the_end_to_end_gate_or_the_cell_nothing_is_measured(
    host: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(accuracy_gate, "require_e2e", gate.require_e2e)
    empty = tmp_path / "evidence"
    empty.mkdir()
    assert accuracy_gate.main([*host["words"], "--evidence", str(empty)]) == 2
    assert "has no PASS of the end-to-end gate on h200x1" in capsys.readouterr().err
    monkeypatch.undo()
    assert accuracy_gate.main(host["words"]) == 2
    assert "this host is not the cell h200x1" in capsys.readouterr().err
    assert host["settings"] == []
