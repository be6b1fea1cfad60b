# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from qualify.audit.symbols import Symbol
from qualify.upgrade.assess import Comparison, assess
from qualify.upgrade.dependencies import Dependency, Use
from qualify.upgrade.rules import RULES, Grade, grade_of

R = "vllm.v1.worker:Runner"


def verdict(trees: Comparison, symbol: str, use: Use, **more: object) -> tuple[Grade, set[str]]:
    dependency = Dependency("it", Symbol.parse(symbol), use, **more)  # type: ignore[arg-type]
    (found,) = assess([dependency], trees)
    return found.verdict.grade, {reason.split(":")[0] for reason in found.verdict.reasons}


@pytest.mark.parametrize(
    ("symbol", "use", "grade", "rules"),
    [
        (f"{R}.steady", Use.COPY, Grade.UNCHANGED, set()),
        ("vllm.v1.engine:Core.shutdown", Use.COPY, Grade.UNCHANGED, set()),
        ("vllm.config:ParallelConfig", Use.CALL, Grade.UNCHANGED, set()),
        ("vllm.v1.engine:Core.__init__", Use.COPY, Grade.ARCHITECTURAL, {"A2", "B4"}),
        ("vllm.v1.engine:Core.run", Use.COPY, Grade.BEHAVIORAL, {"B4", "B9"}),
        ("vllm.layers.moe:Factory", Use.SWAP, Grade.ARCHITECTURAL, {"A3", "M1"}),
        ("vllm.layers.moe:Factory", Use.CALL, Grade.MECHANICAL, {"M1"}),
        ("vllm.model:Factory", Use.CALL, Grade.MECHANICAL, {"M1"}),
        ("vllm.layers.moe:Runner.is_internal_router", Use.READ, Grade.ARCHITECTURAL, {"A4", "B1"}),
        ("vllm.model:Block", Use.SUBCLASS, Grade.ARCHITECTURAL, {"A4", "M6"}),
        ("vllm.helpers:vanish", Use.CALL, Grade.BEHAVIORAL, {"B1"}),
        ("vllm.helpers:vanish", Use.WRAP, Grade.ARCHITECTURAL, {"A1"}),
        ("vllm.helpers:spread", Use.CALL, Grade.MECHANICAL, {"M1"}),
        ("vllm.nowhere:thing", Use.CALL, Grade.ARCHITECTURAL, {"A0"}),
        ("vllm.v1.engine:Core.version", Use.CALL, Grade.MECHANICAL, {"M7"}),
        (f"{R}.prepare", Use.READ, Grade.BEHAVIORAL, {"B3", "M4"}),
        (f"{R}.build", Use.OVERRIDE, Grade.BEHAVIORAL, {"B2"}),
        (f"{R}.forward", Use.OVERRIDE, Grade.MECHANICAL, {"M3"}),
        (f"{R}.choose", Use.OVERRIDE, Grade.BEHAVIORAL, {"B6"}),
        (f"{R}.choose", Use.CALL, Grade.UNCHANGED, set()),
        (f"{R}.load", Use.OVERRIDE, Grade.BEHAVIORAL, {"B5"}),
        (f"{R}.warm_up", Use.RECOPY, Grade.BEHAVIORAL, {"B4", "B6"}),
        ("vllm.v1.worker:total", Use.CALL, Grade.MECHANICAL, {"M2"}),
        ("vllm.version:__version__", Use.READ, Grade.BEHAVIORAL, {"B10"}),
        ("vllm.model:", Use.READ, Grade.MECHANICAL, {"M4"}),
        ("vllm.layers.moe:Runner", Use.SUBCLASS, Grade.BEHAVIORAL, {"B8"}),
    ],
)
def test_each_planted_change_gets_its_grade_and_its_reasons(
    trees: Comparison, symbol: str, use: Use, grade: Grade, rules: set[str]
) -> None:
    assert verdict(trees, symbol, use) == (grade, rules)


def test_an_object_that_stands_in_for_another_is_newly_asked_something(trees: Comparison) -> None:
    grade, rules = verdict(
        trees, "vllm.v1.engine:Core", Use.STUB, held_as="scheduler", holder="vllm.v1.engine:Core"
    )
    assert grade is Grade.BEHAVIORAL
    assert "B7" in rules


def test_handing_on_by_position_is_said_where_an_argument_was_inserted(trees: Comparison) -> None:
    dependency = Dependency("it", Symbol.parse(f"{R}.build"), Use.OVERRIDE, positional=True)
    (found,) = assess([dependency], trees)
    assert found.verdict.reasons[0] == "B2: `longest` inserted; ours hands on by position"


def test_every_rule_has_a_grade_and_a_sentence() -> None:
    for name, text in RULES.items():
        assert grade_of(name) in Grade
        assert len(text) > 20
