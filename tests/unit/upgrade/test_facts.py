# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast

import pytest

from qualify.upgrade.facts import Delta, arity, compare, parameters, signed


def delta(old: str, new: str) -> Delta:
    return compare(ast.parse(old).body, ast.parse(new).body)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("def f(self, a, b): ...", "def f(self, a, c=1, b=2): ...", {"inserted": ("c",), "defaults": ("b",)}),
        ("def f(a): ...", "def f(a, b): ...", {"required": ("b",)}),
        ("def f(a): ...", "def f(a, b=1): ...", {"optional": ("b",)}),
        ("def f(a): ...", "def f(a, *, b): ...", {"required": ("b",)}),
        ("def f(a): ...", "def f(a, *rest, **more): ...", {"optional": ("*rest", "**more")}),
        ("def f(a, b): ...", "def f(a): ...", {"removed": ("b",)}),
        ("def f(a, b): ...", "def f(b, a): ...", {"reordered": True}),
        ("def f(a=1): ...", "def f(a=2): ...", {"defaults": ("a",)}),
        ("def f(a: int) -> int: ...", "def f(a: str) -> str: ...", {"annotations": ("a", "return")}),
        ("@x\ndef f(): ...", "@y\ndef f(): ...", {"decorators": ("-x", "+y")}),
        ("class A(B): ...", "class A(C): ...", {"bases": ("-B", "+C")}),
        ("class A: ...", "@x\nclass A: ...", {"decorators": ("+x",)}),
    ],
)
def test_each_change_of_a_header_is_one_fact(old: str, new: str, expected: dict[str, object]) -> None:
    assert delta(old, new) == Delta(**expected)  # type: ignore[arg-type]


def test_what_a_body_calls_sets_and_refuses_is_compared() -> None:
    found = delta(
        "def f(self):\n    self.a = g()\n    return 1, 2",
        "def f(self):\n    self.b = h()\n    if self.b:\n        raise ValueError\n    return 1, 2, 3",
    )
    assert found.calls == ("-g", "+h")
    assert found.state == ("-a", "+b")
    assert found.refusals == ("self.b",)
    assert found.arity == ((2,), (3,))
    assert found.new_state == ("b",)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def f():\n    x: int = 1", "def f():\n    x: str = 1"),
        ("def f():\n    logger.info('a')\n    g()", "def f():\n    logger.warning('b', 1)\n    g()"),
        ("def f():\n    raise E(f'a {x}')", "def f():\n    raise E(f'b {x}')"),
    ],
)
def test_annotations_log_lines_and_messages_are_cosmetic(old: str, new: str) -> None:
    found = delta(old, new)
    assert found.body
    assert found.cosmetic


def test_a_changed_statement_is_not_cosmetic() -> None:
    assert not delta("def f():\n    return g(1)", "def f():\n    return g(2)").cosmetic


def test_a_value_is_a_value() -> None:
    assert delta("x = 1", "x = 2") == Delta(body=True, value=True)
    assert delta("x = 1", "x = 1  # same") == Delta(value=True)


def test_functions_inside_a_function_do_not_return_for_it() -> None:
    (node,) = ast.parse("def f():\n    def g():\n        return 1, 2, 3\n    return g").body
    assert isinstance(node, ast.FunctionDef)
    assert arity(node) == (1,)
    assert [p.name for p in parameters(node)] == []


def test_what_only_moved_inside_a_body_is_no_fact() -> None:
    assert signed(["a", "b"], ["b", "a"]) == ()
    assert signed(["a", "a"], ["a"]) == ("-a",)
