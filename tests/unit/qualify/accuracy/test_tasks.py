# SPDX-License-Identifier: Apache-2.0
"""The generated questions have right answers, are held out, and are the same everywhere."""

import random
from itertools import islice

import pytest

from qualify.accuracy import data, tasks
from qualify.accuracy.tasks import Example, Task

QUESTIONS = "45e50417"


def solved(example: Example) -> str:
    """The answer worked out from the question's text alone."""
    body = example.question[1:-1]
    if example.task is Task.ADD:
        first, second = body.split("+")
        return "".join(reversed(str(int(first) + int(second))))
    if example.task is Task.SORT:
        return "".join(sorted(body))
    if example.task is Task.COPY:
        return body
    listed, _, name = body.partition(";")
    following = dict(listed.split(","))
    path = ""
    while name in following:
        name = following[name]
        path += name
    return path


@pytest.mark.parametrize("task", Task)
def test_an_answer_follows_from_its_question(task: Task) -> None:
    rng = random.Random(3)
    for size in tasks.TRAINED[task]:
        for _ in range(50):
            example = tasks.make(task, size, rng)
            assert example.answer == solved(example)
            assert example.question.startswith(task.value[0].upper())
            assert tasks.END not in example.question + example.answer


def test_no_evaluated_question_is_trained_on() -> None:
    trained = {example.question for example in islice(tasks.training(1), 4000)}
    for mix in data.MIXES.values():
        asked = {example.question for rows in data.generation_rows(mix).values() for example in rows}
        asked |= {row["question"] for row in data.choice_rows(mix)}
        assert not trained & asked


@pytest.mark.parametrize("mix", data.MIXES.values(), ids=data.MIXES)
def test_the_gate_asks_enough_different_rows(mix: data.Mix) -> None:
    rows = data.generation_rows(mix)
    for examples in rows.values():
        assert len({example.question for example in examples}) == len(examples)
        assert all(example.held_out for example in examples)
    assert sum(map(len, rows.values())) + len(data.choice_rows(mix)) >= 1500


@pytest.mark.parametrize("mix", data.MIXES.values(), ids=data.MIXES)
def test_a_choice_has_one_right_answer_among_four(mix: data.Mix) -> None:
    tasks_by_letter = {task.value[0].upper(): task for task in Task}
    for row in data.choice_rows(mix):
        right = row["choices"][row["right"]]
        assert len(set(row["choices"])) == data.CHOICES
        task = tasks_by_letter[row["question"][0]]
        assert right.strip() == solved(Example(task, 0, row["question"], ""))
        assert all(len(choice) == len(right) for choice in row["choices"])


def test_sizes_with_too_few_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="different sort questions"):
        tasks.held_out(1, Task.SORT, (1,), 50)


def test_the_same_seed_gives_the_same_rows_on_every_machine() -> None:
    rows = [example for task in Task for example in tasks.held_out(1, task, tasks.TRAINED[task][-2:], 200)]
    assert tasks.digest(rows).startswith(QUESTIONS)
