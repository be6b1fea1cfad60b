# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from qualify.audit import normalise

SOURCE = '''
@decorated(1)
def f(a: int, *, b: str = "x", **rest) -> "list[int]":
    """Doc."""
    # a comment
    value = f"{a!r:>{b}} and {rest}"
    return [a, -1, (value, None)]
'''


def digest(source: str) -> str:
    return normalise.digest(ast.parse(dedent(source)).body)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    # a comment\n", ""),
        ('    """Doc."""\n', ""),
        ('    """Doc."""', '    """Another."""'),
        ('"x"', "'x'"),
        ("[a, -1, (value, None)]", "[\n        a,\n        -1,\n        (value, None),\n    ]"),
        ('f"{a!r:>{b}} and {rest}"', 'f"{a!r:>{b}}" " and " f"{rest}"'),
    ],
)
def test_layout_comments_and_docstrings_do_not_change_the_digest(old: str, new: str) -> None:
    assert old in SOURCE
    assert digest(SOURCE.replace(old, new)) == digest(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("decorated(1)", "decorated(2)"),
        ("decorated", "other"),
        ("def f", "async def f"),
        ("a: int", "a: float"),
        ("*, b", "b"),
        ('"x"', '"y"'),
        ("!r", "!s"),
        (" and ", " or "),
        ("-1", "1"),
        ("None", "False"),
        ("-1", "-1.0"),
        ("return", "yield"),
    ],
)
def test_every_change_of_a_token_changes_the_digest(old: str, new: str) -> None:
    assert digest(SOURCE.replace(old, new)) != digest(SOURCE)


def test_the_digest_is_the_same_under_every_interpreter() -> None:
    # computed with CPython 3.10, 3.11, 3.12 and 3.13
    assert digest(SOURCE) == "61a3ac46b2b09de1387024bfaa90ade8b2b770afd3fe49c1a6e18b3c3ed535ae"


def test_a_signature_shows_decorators_defaults_and_the_result() -> None:
    nodes = ast.parse(SOURCE).body
    assert normalise.signature(nodes) == ("@decorated(1) def f(a: int, *, b: str='x', **rest) -> 'list[int]'")
