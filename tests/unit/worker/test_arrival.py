# SPDX-License-Identifier: Apache-2.0
"""What the tokens of a step bring with them when they arrive on vLLM's own thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from afd_plugin.errors import PeerLost
from afd_plugin.v1.worker.attention_worker import AFDAttentionWorker, CheckedOutput


class Arriving(AsyncModelRunnerOutput):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def get_output(self) -> ModelRunnerOutput:
        if self.error is not None:
            raise self.error
        return EMPTY_MODEL_RUNNER_OUTPUT


def worker(known: Exception | None = None) -> tuple[Any, list[BaseException]]:
    """A worker without a device whose link knows of a failure, and what it has told its peers."""

    def check() -> None:
        if known is not None:
            raise known

    told: list[BaseException] = []
    made: Any = object.__new__(AFDAttentionWorker)
    made.link = SimpleNamespace(check=check)
    made._fail = told.append
    return made, told


def test_tokens_are_handed_on_where_nothing_failed() -> None:
    made, told = worker()
    output = made._checked(Arriving())
    assert isinstance(output, CheckedOutput)
    assert output.get_output() is EMPTY_MODEL_RUNNER_OUTPUT
    assert not told


def test_an_error_of_the_tokens_themselves_is_told_too() -> None:
    made, told = worker()
    error = ValueError("NaN in the logits")
    with pytest.raises(ValueError, match="NaN") as caught:
        made._checked(Arriving(error)).get_output()
    assert told == [caught.value]


@pytest.mark.parametrize("error", [None, RuntimeError("an illegal memory access")])
def test_a_failure_that_is_known_forbids_an_answer_and_explains_an_error(error: Exception | None) -> None:
    lost = PeerLost("the FFN is gone")
    made, told = worker(lost)
    with pytest.raises(PeerLost) as caught:
        made._checked(Arriving(error)).get_output()
    assert told == [lost]
    assert caught.value.__context__ is error
