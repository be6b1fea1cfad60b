# SPDX-License-Identifier: Apache-2.0
"""1A1F equals native vLLM to the last bit, and each role holds and reads its own half and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from afd_plugin.config import DensePlacement, GatePlacement, SharedPlacement
from afd_plugin.demo import parity
from afd_plugin.demo.checkpoints import INDEX_NAME
from afd_plugin.demo.native import reference
from afd_plugin.demo.recipes import RECIPES
from tests.e2e.harness import Case, Outcome, run_case

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ENTRIES = 8 * 32 * 3
"""Logprob entries of a record: requests, tokens, candidates."""

PLACEMENTS = [(gate, dense) for gate in GatePlacement for dense in DensePlacement]


@pytest.mark.parametrize(("gate", "dense"), PLACEMENTS, ids=lambda placement: placement.value)
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_tokens_and_logprobs_are_native_to_the_bit_and_every_role_owns_its_half(
    name: str,
    gate: GatePlacement,
    dense: DensePlacement,
    python: Path,
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    case = Case(checkpoints[name], gate=gate, dense=dense)
    outcome = run_case(python, case, tmp_path)

    found = parity.compare(reference(case.model, case.engine, python=python), outcome.record)
    assert (found.requests, found.equal_token_lists) == (8, 8)
    assert (found.logprob_entries, found.bitwise_equal) == (ENTRIES, ENTRIES)
    check_steps(outcome)
    check_weights(case.model, outcome, gate)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v2",
        pytest.param("deepseek-v3", marks=pytest.mark.full),
        pytest.param("qwen3-moe", marks=pytest.mark.full),
    ],
)
def test_shared_experts_beside_the_exchange_are_native_to_the_bit(
    name: str, python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Attention holds and reads them, the FFN neither; a model without any is served all the same."""
    case = Case(checkpoints[name], shared=SharedPlacement.ATTENTION)
    outcome = run_case(python, case, tmp_path)
    found = parity.compare(reference(case.model, case.engine, python=python), outcome.record)
    assert (found.logprob_entries, found.bitwise_equal) == (ENTRIES, ENTRIES)
    check_steps(outcome)
    read = {report["role"]: names_read(report) for report in (outcome.attention, outcome.ffn)}
    shared = {name for names in read.values() for name in names if "shared_expert" in name}
    assert bool(shared) == (name != "qwen3-moe")
    assert shared <= read["attention"]
    assert not shared & read["ffn"]


def check_steps(outcome: Outcome) -> None:
    """Both roles counted the same steps and exactly one message per exchange and direction."""
    attention, ffn = outcome.attention, outcome.ffn
    assert attention["steps"] == ffn["steps"]
    assert attention["steps"]["real"] >= 8 * 32
    exchanges = sum(attention["steps"].values()) * attention["exchanges_per_step"]
    for report in (attention, ffn):
        assert report["exchanges"] == report["messages_sent"] == report["messages_received"] == exchanges
    assert attention["bytes_sent"] == ffn["bytes_received"]


def check_weights(model: Path, outcome: Outcome, gate: GatePlacement) -> None:
    """No expert byte on attention, nothing but units on the FFN, each tensor read by its owner alone."""
    attention, ffn = outcome.attention, outcome.ffn
    assert attention["expert_bytes"] == 0
    assert ffn["expert_bytes"] > 0
    assert (attention["gate_bytes"] > 0) == (gate is GatePlacement.ATTENTION)
    assert ffn["native_runner_bytes"][0] > 0
    assert ffn["native_runner_bytes"][1] == 0

    read = {role: names_read(report) for role, report in (("attention", attention), ("ffn", ffn))}
    assert not [name for name in read["attention"] if "expert" in name]
    assert not [
        name for name in read["ffn"] if any(part in name for part in ("attn", "embed", "lm_head", "norm"))
    ]
    shared = read["attention"] & read["ffn"]
    assert all(name.endswith("e_score_correction_bias") for name in shared), shared
    index = json.loads((model / INDEX_NAME).read_text(encoding="utf-8"))
    assert read["attention"] | read["ffn"] == set(index["weight_map"])

    total = index["metadata"]["total_size"]
    assert abs(attention["weight_bytes"] + ffn["weight_bytes"] - total) <= total / 100


def names_read(report: dict[str, Any]) -> set[str]:
    return {name for names in report["tensor_names"].values() for name in names}
