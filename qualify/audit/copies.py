# SPDX-License-Identifier: Apache-2.0
"""No function of ours is a renamed copy of a function of vLLM's, whole or in part.

Functions are flattened to statements in reading order (a compound statement counts by its header, then its body).
A statement is reduced to its shape: node types, with every name, attribute and literal left out. Where `WINDOW`
statements in a row have equal shapes, the run is followed as long as the names agree up to a consistent renaming, and
is a copy when it is long or heavy enough (`LIMITS`): a renaming does not hide one, a chance likeness is none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qualify.audit.normalise import is_text
from qualify.audit.sources import Package
from qualify.lint.findings import Finding

WINDOW = 3
LIMITS = ((5, 20), (3, 35))
"""A run is a copy from this many statements, whose different shapes have this many syntax nodes in all.

`self.a = a` has four nodes however often it stands there; `if self.a is not None: self.a.close(); self.a = None`
has fifteen.
"""

# fields that hold a name -> the kind of name, since `x`, `.x` and `x=` are renamed independently
_NAMES = {"id": "variable", "name": "variable", "asname": "variable", "attr": "attribute", "module": "module"}
_BODIES = ("body", "handlers", "cases", "orelse", "finalbody")
_IGNORED = frozenset({"ctx", "kind", "type_comment", "returns", "annotation", "type_params"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Statement:
    """One statement: its shape without names, and the names in order."""

    line: int
    shape: str
    names: tuple[str, ...]
    nodes: int


@dataclass(frozen=True)
class Body:
    """The statements of one function."""

    path: str
    name: str
    statements: tuple[Statement, ...]

    def windows(self) -> Iterator[tuple[int, int]]:
        """Start of each run of WINDOW statements, with the hash of its shapes."""
        shapes = [s.shape for s in self.statements]
        for start in range(len(shapes) - WINDOW + 1):
            yield start, hash(tuple(shapes[start : start + WINDOW]))


def check(package: Package, vllm_root: Path) -> Iterator[Finding]:
    """A finding for each function of ours that shares a run with an upstream function."""
    ours = [body for s in package for body in bodies(s.path, s.module.tree)]
    index: dict[int, list[tuple[Body, int]]] = {}
    for body in ours:
        for start, key in body.windows():
            index.setdefault(key, []).append((body, start))
    found: dict[tuple[str, str], tuple[int, Finding]] = {}
    for path in sorted(vllm_root.rglob("*.py")):
        relative = path.relative_to(vllm_root.parent).as_posix()
        for native in bodies(relative, ast.parse(path.read_bytes(), relative)):
            for start, key in native.windows():
                for body, own_start in index.get(key, ()):
                    length = common(body.statements[own_start:], native.statements[start:])
                    best = found.get((body.path, body.name))
                    run = body.statements[own_start : own_start + length]
                    if is_copy(run) and (best is None or best[0] < length):
                        found[body.path, body.name] = (
                            length,
                            _copied(body, own_start, native, start, length),
                        )
    yield from (finding for _, finding in found.values())


def is_copy(run: Sequence[Statement]) -> bool:
    """Whether a shared run is too much to be chance."""
    weight = sum({statement.shape: statement.nodes for statement in run}.values())
    return any(len(run) >= count and weight >= least for count, least in LIMITS)


def common(ours: Sequence[Statement], native: Sequence[Statement]) -> int:
    """How many leading statements agree in shape and, up to a consistent renaming, in names."""
    there: dict[str, str] = {}
    back: dict[str, str] = {}
    for count, (own, other) in enumerate(zip(ours, native, strict=False)):
        if own.shape != other.shape or len(own.names) != len(other.names):
            return count
        for a, b in zip(own.names, other.names, strict=True):
            if there.setdefault(a, b) != b or back.setdefault(b, a) != a:
                return count
    return min(len(ours), len(native))


def bodies(path: str, tree: ast.Module) -> Iterator[Body]:
    """Every function in a file that is long enough to hold a run."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            statements = list(_flattened(node.body))
            if len(statements) >= WINDOW:
                yield Body(path, node.name, tuple(map(_reduced, statements)))


def _flattened(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for statement in body:
        if is_text(statement):
            continue
        yield statement
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            continue
        for name in _BODIES:
            if name in statement._fields:
                yield from _flattened(vars(statement)[name])


def _reduced(statement: ast.AST) -> Statement:
    shape: list[str] = []
    names: list[str] = []
    _reduce(statement, shape, names, top=True)
    line: int = vars(statement).get("lineno", 0)
    return Statement(line, " ".join(shape), tuple(names), len(shape))


def _reduce(node: ast.AST, shape: list[str], names: list[str], top: bool) -> None:
    kind = type(node).__name__
    shape.append(kind)
    if kind == "Constant":
        return
    for name, value in vars(node).items():
        if isinstance(value, ast.AST):
            if name not in _IGNORED:
                _reduce(value, shape, names, top=False)
        elif isinstance(value, list):
            if not (top and name in _BODIES):
                for item in value:
                    if isinstance(item, ast.AST):
                        _reduce(item, shape, names, top=False)
        elif isinstance(value, str) and name in _NAMES:
            names.append(f"{_NAMES[name]} {value}")
        elif name == "arg" and value is not None:
            names.append(f"{'keyword' if kind == 'keyword' else 'variable'} {value}")


def _copied(body: Body, own_start: int, native: Body, start: int, length: int) -> Finding:
    return Finding(
        body.path,
        body.statements[own_start].line,
        "copy",
        f"{length} statements of {body.name} are those of {native.name} ({native.path}:"
        f"{native.statements[start].line}) up to names: call or subclass it, or write what we need in our own way",
    )
