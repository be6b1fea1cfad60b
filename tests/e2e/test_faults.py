# SPDX-License-Identifier: Apache-2.0
"""A wrong FFN is noticed: each planted fault, loaded by the FFN alone, makes the parity check fail."""

from pathlib import Path

import pytest

from afd_plugin.demo import parity
from afd_plugin.demo.faults import Fault, faults_of, plant
from afd_plugin.demo.native import reference
from afd_plugin.demo.recipes import RECIPES
from tests.e2e.harness import Case, faulty, run_case

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_a_planted_fault_fails_the_parity_check(
    fault: Fault, python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    recipe = RECIPES["deepseek-v3"]
    assert fault in faults_of(recipe)
    case = Case(checkpoints["deepseek-v3"])
    wrong = plant(fault, recipe, case.model, tmp_path)
    outcome = run_case(python, faulty(case, wrong), tmp_path / "run")

    found = parity.compare(reference(case.model, case.engine, python=python), outcome.record)
    assert found.bitwise_equal < found.logprob_entries
    assert found.max_abs_dlogprob > 0
    assert found.equal_token_lists < 8
