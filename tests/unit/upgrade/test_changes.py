# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from qualify.audit.symbols import Symbol
from qualify.upgrade.assess import Comparison
from qualify.upgrade.changes import Kind, alike, diff
from tests.unit.upgrade import world


@pytest.mark.parametrize(
    ("symbol", "kind", "target"),
    [
        ("vllm.layers.moe:Factory", Kind.RENAMED, "vllm.layers.moe:RunnerFactory"),
        ("vllm.helpers:spread", Kind.MOVED, "vllm.arithmetic:spread"),
        ("vllm.helpers:vanish", Kind.REMOVED, ""),
        ("vllm.layers.moe:Runner.is_internal_router", Kind.REMOVED, ""),
        ("vllm.v1.worker:Runner.prepare", Kind.CHANGED, ""),
        ("vllm.v1.engine:Core.version", Kind.ADDED, ""),
    ],
)
def test_each_planted_change_is_found_and_named(
    trees: Comparison, symbol: str, kind: Kind, target: str
) -> None:
    change = trees.diff.of(Symbol.parse(symbol))
    assert change is not None
    assert change.kind is kind
    assert str(change.target or "") == target


@pytest.mark.parametrize("symbol", ["vllm.v1.engine:Core.shutdown", "vllm.v1.worker:Runner.steady"])
def test_comments_and_neighbours_change_nothing(trees: Comparison, symbol: str) -> None:
    assert trees.diff.of(Symbol.parse(symbol)) is None


def test_a_module_whose_symbols_live_on_elsewhere_has_moved(trees: Comparison) -> None:
    assert trees.diff.modules == {"vllm.helpers": "vllm.arithmetic"}


def test_header_and_body_are_told_apart(trees: Comparison) -> None:
    header = trees.diff.of(Symbol.parse("vllm.v1.worker:total"))
    body = trees.diff.of(Symbol.parse("vllm.v1.worker:Runner.load"))
    assert header is not None
    assert body is not None
    assert (header.parts, body.parts) == (("signature",), ("body",))


def test_equal_trees_have_no_difference(trees: Comparison) -> None:
    same = diff(trees.old, trees.old, workers=1)
    assert not same.changes
    assert same.files == {"equal": len(world.OLD)}


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    many = {f"vllm/part{n}.py": f"def part{n}(x):\n    return x + {n}\n" for n in range(70)}
    changed = {name: text.replace("x +", "x -") for name, text in many.items()}
    old = world.tree(tmp_path / "old", many | {"vllm/__init__.py": ""}, "0.26.0", "a" * 9)
    new = world.tree(tmp_path / "new", changed | {"vllm/__init__.py": ""}, "0.28.0", "b" * 9)
    assert diff(old, new, workers=2).changes == diff(old, new, workers=1).changes
    assert len(diff(old, new).changes) == 70


def test_likeness_counts_common_words() -> None:
    assert alike({}, {}) == 1.0
    assert alike({"a": 1}, {"b": 1}) == 0.0
    assert alike({"a": 1, "b": 1}, {"a": 1}) == 0.5
