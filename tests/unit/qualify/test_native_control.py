# SPDX-License-Identifier: Apache-2.0
"""The native control's oracle: its own model's answers pass, each planted fault breaks the bound. No engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from afd_plugin.demo.checkpoints import make
from afd_plugin.demo.records import Generation, best
from qualify import native_control
from qualify.native_control import BOUND, ControlError, difference, judge, plant, reference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = ((0, 40, 41, 42), (0, 99, 100, 33, 34, 35, 36))
TOKENS = 6


@pytest.fixture(scope="module", params=native_control.MODELS)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    """A test checkpoint of the control."""
    return make(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make these small products slow."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    """The reference, loaded anew for each test."""
    return reference(checkpoint)


def answer(model: PreTrainedModel, prompt: tuple[int, ...]) -> Generation:
    """What the model itself answers greedily, one token at a time."""
    import torch

    ids, top = list(prompt), []
    for _ in range(TOKENS):
        with torch.inference_mode():
            row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        candidates = best(dict(enumerate(row.tolist())))
        top.append(candidates)
        ids.append(candidates[0][0])
    return Generation(prompt, tuple(ids[len(prompt) :]), tuple(top))


@pytest.fixture
def answers(model: PreTrainedModel) -> list[Generation]:
    """Right answers."""
    return [answer(model, prompt) for prompt in PROMPTS]


def test_right_answers_pass_and_an_expert_one_percent_off_does_not(
    model: PreTrainedModel, answers: list[Generation]
) -> None:
    """Rounding is far below the bound, the planted fault above it."""
    assert difference(model, answers) < BOUND / 5
    assert "experts.down_proj" in plant(model)
    assert difference(model, answers) > BOUND


def test_an_expert_that_is_missing_is_gross(model: PreTrainedModel, answers: list[Generation]) -> None:
    """A zeroed expert that some token needs moves a log probability by far more than the bound."""
    import torch

    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.experts.down_proj").zero_()
    assert difference(model, answers) > 100 * BOUND


@pytest.mark.parametrize("fault", ["token", "position", "candidate"])
def test_a_wrong_answer_breaks_the_bound(
    model: PreTrainedModel, answers: list[Generation], fault: str
) -> None:
    """One token that is not the best, one position's candidates at another, one candidate's value off by 0.002."""
    first = answers[0]
    second_best = first.top_logprobs[2][1][0]
    (name, value), *others = first.top_logprobs[-1]
    wrong = {
        "token": replace(first, token_ids=(*first.token_ids[:2], second_best, *first.token_ids[3:])),
        "position": replace(first, top_logprobs=(*first.top_logprobs[1:], first.top_logprobs[0])),
        "candidate": replace(
            first, top_logprobs=(*first.top_logprobs[:-1], ((name, value + 2 * BOUND), *others))
        ),
    }[fault]
    assert difference(model, [wrong, *answers[1:]]) > BOUND


def test_the_control_refuses_a_difference_and_a_bound_that_finds_nothing() -> None:
    """Both halves of the judgement have their sentence; a NaN passes neither."""
    judge("m", BOUND / 2, BOUND * 2)
    with pytest.raises(ControlError, match=r"differ by 0\.002 in a log probability"):
        judge("m", 2 * BOUND, 1.0)
    with pytest.raises(ControlError, match="differ by nan"):
        judge("m", float("nan"), 1.0)
    with pytest.raises(ControlError, match="cannot find one"):
        judge("m", BOUND / 2, BOUND / 2)


def test_a_runtime_that_is_not_the_cell_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another torch is named, and no model is made."""
    monkeypatch.setattr(native_control.identity, "observe", lambda: None)
    monkeypatch.setattr(native_control.identity, "reconcile", lambda cell, seen: ("torch: another",))
    monkeypatch.setattr(native_control, "make", lambda name: pytest.fail("a model was made"))
    assert native_control.main(["--cell", "cpu"]) == 1
    assert "not the cell cpu" in capsys.readouterr().err


def test_a_cell_that_the_control_does_not_know_is_a_bad_request(capsys: pytest.CaptureFixture[str]) -> None:
    """It exits with 2 and names the cells there are."""
    assert native_control.main(["--cell", "moon"]) == 2
    assert "no cell is called 'moon'" in capsys.readouterr().err
