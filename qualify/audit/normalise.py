# SPDX-License-Identifier: Apache-2.0
"""A text form of Python source that is the same for every interpreter from 3.10 on and for every layout.

Comments, docstrings, blank lines, line breaks, quotes and redundant parentheses do not count; everything else does.
`ast.dump` and `ast.unparse` are not used for digests, since what they print depends on the interpreter.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Sequence

_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores", "lineno", "col_offset"})

Definition = Sequence[ast.AST]


def canonical(node: ast.AST) -> str:
    """The normalised text of a syntax tree."""
    parts: list[str] = []
    _write(node, parts)
    return "".join(parts)


def digest(nodes: Iterable[ast.AST]) -> str:
    """SHA-256, in hexadecimal, over the normalised text of `nodes` in order."""
    return hashlib.sha256("\n".join(canonical(node) for node in nodes).encode()).hexdigest()


def header(node: ast.ClassDef) -> ast.ClassDef:
    """A class without its body: name, bases, keywords, decorators."""
    return ast.ClassDef(
        name=node.name, bases=node.bases, keywords=node.keywords, body=[], decorator_list=node.decorator_list
    )


def signature(nodes: Definition) -> str:
    """What a caller sees of a definition: a function's or class's header, or an assignment's target and annotation."""
    return " | ".join(dict.fromkeys(_signature(node) for node in nodes))


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
        prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{decorators}{prefix} {node.name}({ast.unparse(node.args)}){returns}"
    if isinstance(node, ast.ClassDef):
        decorators = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
        bases = ", ".join([*map(ast.unparse, node.bases), *map(ast.unparse, node.keywords)])
        return f"{decorators}class {node.name}({bases})" if bases else f"{decorators}class {node.name}"
    if isinstance(node, ast.AnnAssign):
        return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    if isinstance(node, ast.Assign):
        return " = ".join(ast.unparse(target) for target in node.targets)
    return type(node).__name__


def is_text(statement: ast.AST) -> bool:
    """Whether a statement is a bare string: a docstring, wherever it stands."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _write(value: object, parts: list[str]) -> None:
    if isinstance(value, ast.JoinedStr):
        parts.append("JoinedStr(")
        for piece in _merged(value.values):
            _write(piece, parts)
        parts.append(")")
    elif isinstance(value, ast.AST):
        parts.append(type(value).__name__)
        parts.append("(")
        for name, content in ast.iter_fields(value):
            if name in _IGNORED or content is None or content == []:
                continue
            parts.append(f"{name}=")
            _write(content, parts)
            parts.append(",")
        parts.append(")")
    elif isinstance(value, list):
        parts.append("[")
        for item in value:
            if not is_text(item):
                _write(item, parts)
                parts.append(",")
        parts.append("]")
    else:
        parts.append(f"{type(value).__name__}:{value!r}")


def _merged(values: Sequence[ast.expr]) -> list[ast.expr]:
    """The pieces of an f-string with neighbouring literals joined and empty ones dropped."""
    pieces: list[ast.expr] = []
    for value in values:
        last = pieces[-1] if pieces else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            pieces[-1] = ast.Constant(value=str(last.value) + str(value.value))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            pieces.append(value)
    return pieces
