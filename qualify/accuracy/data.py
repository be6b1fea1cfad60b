# SPDX-License-Identifier: Apache-2.0
"""The evaluated rows: how many of which task and size, and the files that lm-eval reads.

`MIXES` is what the gate asks of each model, the same of both sides. The digest of the rows stands in every record.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qualify.accuracy import tasks
from qualify.accuracy.architectures import DEEPSEEK_V3, QWEN3_MOE
from qualify.accuracy.tasks import Example, Task

SEED = 20260804
CHOICE = "choice"


@dataclass(frozen=True)
class Part:
    """`count` rows of one task, the sizes taken in turn."""

    task: Task
    sizes: Sequence[int]
    count: int


@dataclass(frozen=True)
class Mix:
    """What one model is asked: rows to generate, and rows of which the likeliest of four answers is taken."""

    generated: tuple[Part, ...]
    chosen: tuple[Part, ...]


MIXES: Mapping[str, Mix] = {
    QWEN3_MOE.name: Mix(
        (
            Part(Task.ADD, (3,), 500),
            Part(Task.SORT, (7, 8), 450),
            Part(Task.COPY, (8, 16, 24), 200),
            Part(Task.LOOK, (2, 3, 4), 250),
        ),
        (Part(Task.ADD, (3,), 100), Part(Task.LOOK, (3, 4), 100)),
    ),
    DEEPSEEK_V3.name: Mix(
        (
            Part(Task.SORT, (4, 5), 300),
            Part(Task.COPY, (4, 8, 12, 16, 24), 900),
            Part(Task.LOOK, (2, 3), 200),
        ),
        (Part(Task.SORT, (4,), 100), Part(Task.COPY, (8,), 100)),
    ),
}
"""By model, chosen by what it has learned, so that its accuracy lies where a difference shows in both directions."""

CHOICES = 4


def generation_rows(mix: Mix, limit: int | None = None) -> dict[str, list[Example]]:
    """The rows that are answered by generating, by task name; the first `limit` of each."""
    return {
        part.task.value: tasks.held_out(SEED, part.task, part.sizes, part.count)[:limit]
        for part in mix.generated
    }


def choice_rows(mix: Mix, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows that are answered by the likeliest of four: the right answer and three that are off by one place."""
    rng = random.Random(f"{SEED}/{CHOICE}")
    examples = [
        example
        for part in mix.chosen
        for example in tasks.held_out(SEED + 1, part.task, part.sizes, part.count)
    ]
    rng.shuffle(examples)
    rows = []
    for example in examples:
        wrong: set[str] = set()
        while len(wrong) < CHOICES - 1:
            wrong.add(_spoiled(example, rng))
            wrong.discard(example.answer)
        choices = [example.answer, *sorted(wrong)]
        rng.shuffle(choices)
        rows.append(
            {
                "question": example.question,
                "choices": [choice + tasks.END for choice in choices],
                "right": choices.index(example.answer),
            }
        )
    return rows[:limit]


def _spoiled(example: Example, rng: random.Random) -> str:
    """The answer with one character replaced by a digit or a letter of the question."""
    place = rng.randrange(len(example.answer))
    digits = example.task in (Task.ADD, Task.SORT)
    others = string.digits if digits else "".join(filter(str.isalpha, example.question[1:]))
    return example.answer[:place] + rng.choice(others) + example.answer[place + 1 :]


def write(folder: Path, mix: Mix, limit: int | None = None) -> dict[str, int]:
    """Write one JSON file per task into `folder`; rows by task name, as lm-eval is to score them."""
    rows: dict[str, list[dict[str, Any]]] = {
        name: [{"question": example.question, "answer": example.answer} for example in examples]
        for name, examples in generation_rows(mix, limit).items()
    }
    rows[CHOICE] = choice_rows(mix, limit)
    for name, content in rows.items():
        write_lines(folder / f"{name}.jsonl", content)
    return {f"afd_{name}": len(content) for name, content in rows.items()}


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")


def digest(folder: Path) -> str:
    """SHA-256 over the data files of `folder`, by name."""
    whole = hashlib.sha256()
    for path in sorted(folder.glob("*.jsonl")):
        whole.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()
