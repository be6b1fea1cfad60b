# SPDX-License-Identifier: Apache-2.0
"""The evaluated rows: how many of which task and size, and the files that lm-eval reads.

`MIX` is what the gate asks. It is the same for both sides and both models and is changed only with the generator:
its digest stands in every record.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qualify.accuracy import tasks
from qualify.accuracy.tasks import Example, Task

SEED = 20260804
CHOICE = "choice"


@dataclass(frozen=True)
class Part:
    """`count` rows of one task, the sizes taken in turn."""

    task: Task
    sizes: Sequence[int]
    count: int


MIX: tuple[Part, ...] = (
    Part(Task.ADD, (2, 3), 400),
    Part(Task.SORT, (4, 5, 6, 7, 8), 350),
    Part(Task.COPY, (6, 12, 16, 24), 300),
    Part(Task.LOOK, (2, 3, 4), 350),
)
CHOICE_ROWS = 200
CHOICES = 4


def generation_rows(limit: int | None = None) -> dict[str, list[Example]]:
    """The rows that are answered by generating, by task name; the first `limit` of each."""
    return {part.task.value: tasks.held_out(SEED, part.task, part.sizes, part.count)[:limit] for part in MIX}


def choice_rows(limit: int | None = None) -> list[dict[str, Any]]:
    """The rows that are answered by the likeliest of four: the right answer and three that are off by one place."""
    rng = random.Random(f"{SEED}/{CHOICE}")
    examples = [
        example
        for task, sizes in ((Task.ADD, (3,)), (Task.LOOK, (3, 4)))
        for example in tasks.held_out(SEED + 1, task, sizes, CHOICE_ROWS // 2)
    ]
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
    """The answer with one character replaced by another that the question or the digits offer."""
    place = rng.randrange(len(example.answer))
    others = "0123456789" if example.task is Task.ADD else "".join(filter(str.isalpha, example.question[1:]))
    return example.answer[:place] + rng.choice(others) + example.answer[place + 1 :]


def write(folder: Path, limit: int | None = None) -> dict[str, int]:
    """Write one JSON file per task into `folder`; rows by task name, as lm-eval is to score them."""
    rows: dict[str, list[dict[str, Any]]] = {
        name: [{"question": example.question, "answer": example.answer} for example in examples]
        for name, examples in generation_rows(limit).items()
    }
    rows[CHOICE] = choice_rows(limit)
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
