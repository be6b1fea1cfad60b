# SPDX-License-Identifier: Apache-2.0
"""The full-scale path runs end to end, with a trained checkpoint in the model's place and data of the same form."""

import json
import random
from pathlib import Path

import pytest

from qualify.accuracy import data, gsm8k
from qualify.accuracy.architectures import QWEN3_MOE
from qualify.accuracy.gate import DIAGNOSTIC

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ROWS = 40


def made(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Word problems with worked answers, in GSM8K's form."""
    rows = []
    for _ in range(count):
        first, second, each = rng.randrange(10, 99), rng.randrange(10, 99), rng.randrange(2, 9)
        question = f"Ann has {first} pens and buys {second} more. A pen costs {each}. What are they worth?"
        total = first + second
        answer = (
            f"There are {first}+{second}=<<{first}+{second}={total}>>{total} pens.\n"
            f"They are worth {total}*{each}=<<{total}*{each}={total * each}>>{total * each}.\n#### {total * each}"
        )
        rows.append({"question": question, "answer": answer})
    return rows


def test_all_rows_of_a_local_file_are_asked_of_both_sides(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(11)
    data.write_lines(tmp_path / "train.jsonl", made(rng, 8))
    data.write_lines(tmp_path / "test.jsonl", made(rng, ROWS))
    status = gsm8k.main(
        [
            "--model", str(trained[QWEN3_MOE.name]), "--train", str(tmp_path / "train.jsonl"),
            "--test", str(tmp_path / "test.jsonl"), "--output", str(tmp_path / "out"),
            "--max-num-batched-tokens", "64", "--bitwise",
        ]
    )  # fmt: skip
    said = capsys.readouterr().out
    print(said)
    assert status == DIAGNOSTIC
    assert f"{ROWS} rows of 1319" in said
    metrics = json.loads(said[said.index("{") : said.index("}") + 1])
    assert metrics["gsm8k_rows"] == ROWS
    assert metrics["gsm8k_differing"] == metrics["gsm8k_lost"] == metrics["gsm8k_won"] == 0
