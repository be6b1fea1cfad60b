# SPDX-License-Identifier: Apache-2.0
"""The generated tasks: questions whose answer can be checked, one line each, in characters.

Standard library only. A question is held out by a checksum of its own text, so no evaluated row was trained
on, whatever the seeds. An answer ends with a newline, which is where generation stops.

| task | question | answer |
| --- | --- | --- |
| add | `A47+385=` | the sum, units first: `234` |
| sort | `S73914>` | the digits in order: `13479` |
| copy | `Cqwxvb>` | the same letters: `qwxvb` |
| look | `Lqx,wm,xe,ew;q>` | follow the pairs from `q` to their end: `xewm` |
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import random
import string
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

HELD_OUT_ONE_IN = 8
END = "\n"


class Task(str, enum.Enum):
    """What is asked; the first letter of the question in capitals."""

    ADD = "add"
    SORT = "sort"
    COPY = "copy"
    LOOK = "look"


@dataclass(frozen=True)
class Example:
    """One question with its answer; `size` is the number of digits, letters or hops."""

    task: Task
    size: int
    question: str
    answer: str

    @property
    def text(self) -> str:
        """What a model is trained on."""
        return self.question + self.answer + END

    @property
    def held_out(self) -> bool:
        """Whether the question belongs to the evaluation only."""
        return zlib.crc32(self.question.encode()) % HELD_OUT_ONE_IN == 0


Sizes = Mapping[Task, Sequence[int]]
"""The sizes to draw from, evenly; a size that stands twice is drawn twice as often."""

TRAINED: Sizes = {
    Task.ADD: (1, 2, 2, 3, 3, 3),
    Task.SORT: (2, 3, 4, 5, 6, 7, 8),
    Task.COPY: (3, 4, 6, 8, 12, 16, 24),
    Task.LOOK: (1, 2, 3, 4),
}


def _add(rng: random.Random, size: int) -> tuple[str, str]:
    top = 10**size
    first, second = rng.randrange(top // 10 if size > 1 else 0, top), rng.randrange(top)
    if rng.randrange(2):
        first, second = second, first
    return f"A{first}+{second}=", str(first + second)[::-1]


def _sort(rng: random.Random, size: int) -> tuple[str, str]:
    digits = [rng.randrange(10) for _ in range(size)]
    return f"S{''.join(map(str, digits))}>", "".join(map(str, sorted(digits)))


def _copy(rng: random.Random, size: int) -> tuple[str, str]:
    letters = "".join(string.ascii_lowercase[rng.randrange(26)] for _ in range(size))
    return f"C{letters}>", letters


def _look(rng: random.Random, size: int) -> tuple[str, str]:
    """A chain of `size` hops among a second chain that leads elsewhere."""
    other = 1 + rng.randrange(3)
    names = rng.sample(string.ascii_lowercase, size + other + 2)
    chain, distractor = names[: size + 1], names[size + 1 :]
    pairs = [left + right for path in (chain, distractor) for left, right in itertools.pairwise(path)]
    rng.shuffle(pairs)
    return f"L{','.join(pairs)};{chain[0]}>", "".join(chain[1:])


_MAKERS: Mapping[Task, Callable[[random.Random, int], tuple[str, str]]] = {
    Task.ADD: _add,
    Task.SORT: _sort,
    Task.COPY: _copy,
    Task.LOOK: _look,
}


def make(task: Task, size: int, rng: random.Random) -> Example:
    """One example drawn from `rng`."""
    question, answer = _MAKERS[task](rng, size)
    return Example(task, size, question, answer)


def training(seed: int, sizes: Sizes = TRAINED) -> Iterator[Example]:
    """Examples to train on, without end: every task as often as another, none held out."""
    rng = random.Random(seed)
    tasks = tuple(sizes)
    while True:
        task = tasks[rng.randrange(len(tasks))]
        example = make(task, sizes[task][rng.randrange(len(sizes[task]))], rng)
        if not example.held_out:
            yield example


def held_out(seed: int, task: Task, sizes: Sequence[int], count: int) -> list[Example]:
    """`count` different held-out examples of `task`, their sizes taken in turn.

    ValueError when that many different questions were not found: the sizes are too small.
    """
    rng = random.Random(f"{seed}/{task.value}")
    found: dict[str, Example] = {}
    for _ in range(count * HELD_OUT_ONE_IN * 40):
        example = make(task, sizes[len(found) % len(sizes)], rng)
        if example.held_out:
            found.setdefault(example.question, example)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"only {len(found)} of {count} different {task.value} questions of the sizes {sizes}")


def digest(examples: Sequence[Example]) -> str:
    """SHA-256 over the texts, in order."""
    return hashlib.sha256("".join(example.text for example in examples).encode()).hexdigest()
