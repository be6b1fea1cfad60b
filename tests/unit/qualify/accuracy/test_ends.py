# SPDX-License-Identifier: Apache-2.0
"""How an accuracy run ends: what passes, what fails, what proves nothing. The servers' answers are planted."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from qualify.accuracy import gate, gsm8k, harness
from qualify.accuracy.harness import HarnessFailed, Spec
from qualify.accuracy.scoring import Row, Side
from qualify.accuracy.sides import Layout
from qualify.identity import Binding


class Answers:
    """Stands in for serving and asking: 85 of 100 rows are right, but for what is planted in one layout."""

    def __init__(self) -> None:
        self.lost: Mapping[Layout, int] = {}
        self.failing: Layout | None = None
        self.asked: list[Layout] = []

    def __call__(
        self, layout: Layout, model: Path, rows: Mapping[str, int], *_: Any, **__: Any
    ) -> tuple[Side, float]:
        self.asked.append(layout)
        if layout is self.failing:
            raise HarnessFailed("the server answered 500")
        lost = self.lost.get(layout, 0)
        answered = {}
        for task, count in rows.items():
            right = [number % 100 < 85 and number >= lost for number in range(count)]
            answered[task] = tuple(Row(n, ok, ("yes" if ok else "no",)) for n, ok in enumerate(right))
        return Side(answered, "r" * 64, "s" * 64), 1.0


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Answers]:
    """Answers for both gates; accounts are written where a chain would read them."""
    found = Answers()
    monkeypatch.setattr(gate, "answers", found)
    monkeypatch.setattr(gsm8k, "answers", found)
    monkeypatch.setattr(gate, "require_e2e", lambda *_: None)
    monkeypatch.setenv(gate.METRICS, str(tmp_path / "metrics.json"))
    monkeypatch.setenv(gate.DIGESTS, str(tmp_path / "digests.json"))
    before = signal.getsignal(signal.SIGTERM)
    yield found
    signal.signal(signal.SIGTERM, before)


def run(tmp_path: Path, *words: str) -> int:
    return gate.main(["--output", str(tmp_path / "out"), *words])


def test_equal_answers_of_every_layout_and_model_pass_and_reach_the_record(
    planted: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Native is asked first, then each layout, for both models; rows and digests are handed to the chain."""
    assert run(tmp_path) == 0
    assert planted.asked == [Layout.NATIVE, *gate.AFD_LAYOUTS] * 2
    assert capsys.readouterr().out.splitlines()[-1] == "accuracy: PASS"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["trained-qwen3-moe_1A1F_rows"] >= 1500
    assert metrics["trained-deepseek-v3_2A1F_differing"] == 0
    assert set(json.loads((tmp_path / "digests.json").read_text()).values()) >= {"r" * 64, "s" * 64}


def test_answers_that_one_layout_loses_fail_with_its_name(
    planted: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other layout and the other model are measured all the same, and are not blamed."""
    planted.lost = {Layout.TWO_ONE: 30}
    assert run(tmp_path) == 1
    said = capsys.readouterr().out.partition("accuracy: FAIL")[2]
    assert "trained-qwen3-moe 2A1F: answers that should be equal to the bit are not" in said
    assert "1A1F" not in said


@pytest.mark.parametrize(
    "words", [("--rows", "20"), ("--model", "trained-qwen3-moe"), ("--layout", "1A1F"), ("--diagnostic",)]
)
def test_a_limited_run_proves_nothing_however_well_it_went(
    words: tuple[str, ...], planted: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer rows, models or layouts: never status 0, and the last line says what it is."""
    assert run(tmp_path, *words) == gate.DIAGNOSTIC
    assert capsys.readouterr().out.splitlines()[-1].startswith("DIAGNOSTIC, not evidence")


def test_a_server_that_does_not_answer_is_a_failure_and_no_score(
    planted: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it reaches the record."""
    planted.failing = Layout.ONE_ONE
    assert run(tmp_path) == 1
    assert "accuracy is FAIL: the server answered 500" in capsys.readouterr().err
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize(
    ("cell", "said"),
    [("h200x1", "`nox -s accuracy -- --cell h200x1`"), ("tpu", "no cell is called 'tpu'")],
)
def test_a_cell_that_cannot_be_measured_is_told_before_anything_is_asked(
    cell: str, said: str, planted: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU cell is measured by another command, which is named; nothing passes here."""
    assert run(tmp_path, "--cell", cell) == 2
    assert said in capsys.readouterr().err
    assert planted.asked == []


def test_without_the_end_to_end_gate_on_record_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger of this very revision is what counts; the sentence names the way on."""
    monkeypatch.setattr(gate.identity, "observe", lambda: None)
    monkeypatch.setattr(gate.identity, "bind", lambda *_: Binding("cpu", "l" * 64, "r" * 64, "e" * 64))
    assert run(tmp_path, "--evidence", str(tmp_path)) == 2
    assert "no PASS of the end-to-end gate on cpu at revision rrrrrrrrrrrr" in capsys.readouterr().err


def _questions(path: Path, count: int) -> Path:
    row = json.dumps({"question": "two and two?", "answer": "so\n#### 4"})
    path.write_text(f"{row}\n" * count, encoding="utf-8")
    return path


def _gsm8k(tmp_path: Path, rows: int, *words: str, worked: int = 5) -> int:
    train, test = _questions(tmp_path / "train.jsonl", worked), _questions(tmp_path / "test.jsonl", rows)
    files = ["--model", str(tmp_path), "--train", str(train), "--test", str(test)]
    run_of_its_own = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
    return gsm8k.main([*files, "--output", str(run_of_its_own), *words])


def test_gsm8k_passes_on_all_rows_fails_on_a_loss_and_proves_nothing_on_fewer(
    planted: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same files, native against 1A1F; native must score what the model is known for."""
    assert _gsm8k(tmp_path, gsm8k.ROWS, "--bitwise", "--reference", "0.84", "0.86") == 0
    assert planted.asked == [Layout.NATIVE, Layout.ONE_ONE]
    assert _gsm8k(tmp_path, gsm8k.ROWS, "--reference", "0.10", "0.20") == 1
    planted.lost = {Layout.ONE_ONE: 60}
    assert _gsm8k(tmp_path, gsm8k.ROWS) == 1
    assert "worse than native" in capsys.readouterr().out
    planted.lost = {}
    assert _gsm8k(tmp_path, 20) == gsm8k.DIAGNOSTIC
    assert "20 rows of 1319" in capsys.readouterr().out


def test_gsm8k_without_enough_worked_examples_or_without_a_server_is_no_result(
    planted: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that are not in the form are status 2; a side that does not answer is a failure."""
    assert _gsm8k(tmp_path, 20, worked=4) == 2
    assert "has 4 worked examples, 5 are needed" in capsys.readouterr().err
    planted.failing = Layout.ONE_ONE
    assert _gsm8k(tmp_path, 20) == 1
    assert "gsm8k is FAIL: the server answered 500" in capsys.readouterr().err


def _spec(folder: Path) -> Spec:
    return Spec("http://127.0.0.1:1/v1/completions", "m", "t", ("afd_sort",), 64, str(folder / "out.json"))


def test_what_lm_eval_returned_is_kept_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child gets the whole spec; the file holds the results, the samples and what they were made with."""
    names = ("results", "n-samples", "configs", "versions", "samples")
    seen: list[Spec] = []

    def evaluate(spec: Spec) -> dict[str, Any]:
        seen.append(spec)
        return {name: {"of": name} for name in (*names, "config")}

    monkeypatch.setattr(harness, "evaluate", evaluate)
    asked = tmp_path / "spec.json"
    asked.write_text(json.dumps(harness.asdict(_spec(tmp_path))), encoding="utf-8")
    assert harness.main([str(asked)]) == 0
    assert seen == [_spec(tmp_path)]
    assert json.loads((tmp_path / "out.json").read_text()) == {name: {"of": name} for name in names}


@pytest.mark.parametrize(
    ("script", "limit", "said"),
    [
        ("echo no such tokenizer; exit 3", 20, r"(?s)ended with 3.*no such tokenizer"),
        ("exit 0", 20, "ended with 0"),
        ("exec sleep 30", 0.5, "no result within"),
    ],
)
def test_an_lm_eval_that_fails_returns_nothing_or_takes_too_long_is_told_with_its_last_words(
    script: str, limit: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file there is no result, whatever the status was."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(HarnessFailed, match=said):
        harness.run(_spec(tmp_path), tmp_path, tmp_path / "scratch", limit)
