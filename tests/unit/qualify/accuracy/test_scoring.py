# SPDX-License-Identifier: Apache-2.0
"""What is not a result is refused before it is scored, and a difference fails the verdict."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qualify.accuracy import gsm8k
from qualify.accuracy.scoring import Row, Side, Unscorable, differing, read
from qualify.accuracy.verdict import FEWEST_ROWS, Comparison

REQUESTED = {"afd_sort": 50, "afd_choice": 10}


def returned() -> dict[str, Any]:
    """What lm-eval returns for two tasks, in its own form."""
    sort = [
        {"doc_id": number, "exact_match": float(number % 5 > 0), "resps": [[f"12{number}"]]}
        for number in range(50)
    ]
    choice = [
        {"doc_id": number, "acc": 1.0, "resps": [[[-0.25 - number, True]], [[-9.5, False]]]}
        for number in range(10)
    ]
    results = {
        "afd_sort": {"alias": "afd_sort", "exact_match,none": 0.8, "exact_match_stderr,none": "N/A"},
        "afd_choice": {"alias": "afd_choice", "acc,none": 1.0, "acc_stderr,none": "N/A"},
    }
    return {"samples": {"afd_sort": sort, "afd_choice": choice}, "results": results}


def written(content: dict[str, Any], folder: Path) -> Path:
    path = folder / "lm-eval.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_sound_result_is_read_row_by_row(tmp_path: Path) -> None:
    side = read(written(returned(), tmp_path), REQUESTED)
    assert side.scored == 60
    assert sum(side.right) == 50
    assert side.rows["afd_choice"][3] == Row(3, True, ("-3.25", "-9.5"))
    assert len(side.results) == len(side.samples) == 64


def _drop_a_row(content: dict[str, Any]) -> None:
    del content["samples"]["afd_sort"][7]


def _score_a_row_twice(content: dict[str, Any]) -> None:
    content["samples"]["afd_sort"][7] = content["samples"]["afd_sort"][8]


def _drop_a_task(content: dict[str, Any]) -> None:
    del content["samples"]["afd_choice"]


def _not_a_number(content: dict[str, Any]) -> None:
    content["samples"]["afd_choice"][2]["resps"][1] = [[float("nan"), False]]


def _a_positive_log_probability(content: dict[str, Any]) -> None:
    content["samples"]["afd_choice"][2]["resps"][1] = [[0.5, False]]


def _empty(content: dict[str, Any]) -> None:
    for sample in content["samples"]["afd_sort"][:4]:
        sample["resps"] = [[""]]


def _all_the_same(content: dict[str, Any]) -> None:
    for sample in content["samples"]["afd_sort"]:
        sample["resps"] = [["12"]]


def _another_mean(content: dict[str, Any]) -> None:
    content["results"]["afd_sort"]["exact_match,none"] = 0.82


def _no_score(content: dict[str, Any]) -> None:
    del content["samples"]["afd_sort"][0]["exact_match"]


def _half_a_score(content: dict[str, Any]) -> None:
    content["samples"]["afd_sort"][0]["exact_match"] = 0.5


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_drop_a_row, "50 rows were requested, 49 were scored"),
        (_score_a_row_twice, "rows were requested"),
        (_drop_a_task, "were requested"),
        (_not_a_number, "log probability nan"),
        (_a_positive_log_probability, "log probability 0.5"),
        (_empty, "4 of 50 answers are empty"),
        (_all_the_same, "all 50 answers are the same"),
        (_another_mean, "its samples give 0.8"),
        (_no_score, "no score of 0 or 1"),
        (_half_a_score, "no score of 0 or 1"),
    ],
)
def test_a_broken_run_is_no_score(
    spoil: Callable[[dict[str, Any]], None], reason: str, tmp_path: Path
) -> None:
    content = returned()
    spoil(content)
    with pytest.raises(Unscorable, match=reason):
        read(written(content, tmp_path), REQUESTED)


def side(right: list[bool], said: list[str] | None = None) -> Side:
    texts = said or [str(value) for value in right]
    rows = tuple(Row(number, value, (texts[number],)) for number, value in enumerate(right))
    return Side({"afd_sort": rows}, "", "")


NATIVE = [number % 10 > 0 for number in range(FEWEST_ROWS)]


def test_equal_sides_pass() -> None:
    assert Comparison.of(side(NATIVE), side(NATIVE), bitwise=True).faults() == ()


def test_one_other_character_fails_where_the_bits_must_be_equal() -> None:
    said = [str(value) for value in NATIVE]
    said[3] += "!"
    other = side(NATIVE, said)
    assert differing(side(NATIVE), other) == {"afd_sort": 1}
    (fault,) = Comparison.of(side(NATIVE), other, bitwise=True).faults()
    assert "equal to the bit" in fault
    assert Comparison.of(side(NATIVE), other, bitwise=False).faults() == ()


def test_five_losses_without_a_win_fail_and_four_do_not() -> None:
    def losing(count: int) -> Side:
        right = list(NATIVE)
        for place in range(1, 1 + count):
            right[place] = False
        return side(right)

    assert Comparison.of(side(NATIVE), losing(4), bitwise=False).faults() == ()
    (fault,) = Comparison.of(side(NATIVE), losing(5), bitwise=False).faults()
    assert "lost 5 rows and won 0" in fault


def test_wins_do_not_fail() -> None:
    assert Comparison.of(side(NATIVE), side([True] * FEWEST_ROWS), bitwise=False).faults()[:1] != (
        "AFD is worse",
    )
    better = list(NATIVE)
    better[0] = True
    assert Comparison.of(side(NATIVE), side(better), bitwise=False).faults() == ()


@pytest.mark.parametrize("share", [2, 100])
def test_a_model_that_is_too_weak_or_too_strong_proves_nothing(share: int) -> None:
    right = [number % share > 0 for number in range(FEWEST_ROWS)]
    (fault,) = Comparison.of(side(right), side(right), bitwise=True).faults()
    assert "outside 0.7 to 0.97" in fault


def test_a_limited_run_cannot_pass() -> None:
    (fault,) = Comparison.of(side(NATIVE[:-1]), side(NATIVE[:-1]), bitwise=True).faults()
    assert "diagnosis" in fault


def test_noise_that_hides_two_points_fails() -> None:
    noisy = list(NATIVE)
    for place in range(60):
        noisy[10 * place] = True
        noisy[10 * place + 1] = False
    assert any(
        "smallest that shows" in fault
        for fault in Comparison.of(side(NATIVE), side(noisy), bitwise=False).faults()
    )


def test_all_rows_of_gsm8k_are_enough_and_native_must_score_what_the_model_is_known_for() -> None:
    right = [number * 379 % 1000 < 379 for number in range(gsm8k.ROWS)]
    equal = Comparison.of(side(right), side(right), bitwise=True)
    assert gsm8k.verdict(equal, None) == ()
    assert gsm8k.verdict(equal, (0.40, 0.41)) == ()
    (fault,) = gsm8k.verdict(equal, (0.50, 0.51))
    assert "native accuracy" in fault
    fewer = Comparison.of(side(right[1:]), side(right[1:]), bitwise=True)
    assert "diagnosis" in gsm8k.verdict(fewer, None)[0]


def test_a_data_file_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2\\n#### 2"}\n{"question": "1+2?", "answer": "3"}\n')
    with pytest.raises(gsm8k.NotTheForm, match=r"test\.jsonl:2"):
        gsm8k.lines(path)
