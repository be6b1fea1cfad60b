# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill and prefix caching, off and on, in the order of the roadmap: each equals native to the bit.

Every mode is also run with all requests queued together, where equal step logs make equal bits a fair demand.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afd_plugin.demo import parity
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.native import BatchPlan, command
from afd_plugin.demo.records import Record, read_record
from tests.e2e.harness import STEP_RECORDERS, Case, Role, environment, run_case, run_together
from tests.e2e.recorders import LOG_VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WHOLE_PROMPTS = EngineArguments(max_num_batched_tokens=512, enable_chunked_prefill=False)
"""Without chunked prefill vLLM wants a step to hold the longest context."""

MODES = {
    "chunked-off-caching-off": WHOLE_PROMPTS,
    "chunked-on-caching-off": EngineArguments(),
    "chunked-off-caching-on": replace(WHOLE_PROMPTS, enable_prefix_caching=True),
    "chunked-on-caching-on": EngineArguments(enable_prefix_caching=True),
}

ALONE_AGAIN_TOGETHER: BatchPlan = ((0,), (7,), (7,), (6, 5), (1, 2, 3, 4))
"""Single requests, then pairs and a batch. The longest prompt comes twice: it alone fills a KV block (128 tokens), so
its second run is the one that prefix caching can shorten, and the one whose answer is recorded."""


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_native_to_the_bit_under_equal_batches(
    mode: str, python: Path, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        checkpoints["deepseek-v2"],
        engine=MODES[mode],
        plan=ALONE_AGAIN_TOGETHER,
        attention_worker=STEP_RECORDERS[Role.ATTENTION],
    )
    native, native_steps = run_native(python, case, tmp_path / "native")
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "afd.steps"))
    outcome = run_case(python, case, tmp_path / "afd")
    steps = read_steps(tmp_path / "afd.steps")

    assert steps == native_steps
    found = parity.compare(native, outcome.record)
    assert found.bitwise_equal == found.logprob_entries == 8 * 32 * 3
    partial = sum(step["partial_prefills"] for step in steps)
    assert (partial > 0) == MODES[mode].enable_chunked_prefill
    cached = sum(step["cached_prompt_tokens"] for step in steps)
    assert (cached > 0) == MODES[mode].enable_prefix_caching
    assert any(len(step["tokens"]) > 1 for step in steps)


def run_native(python: Path, case: Case, folder: Path) -> tuple[Record, list[dict[str, Any]]]:
    folder.mkdir(parents=True)
    output, log = folder / "record.json", folder / "native.steps"
    words = command(case.model, output, case.engine, case.plan, {"worker_cls": STEP_RECORDERS[None]})
    run_together({"native": [str(python), *words]}, environment({LOG_VARIABLE: str(log)}), folder)
    return read_record(output), read_steps(log)


def read_steps(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
