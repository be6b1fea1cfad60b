# SPDX-License-Identifier: Apache-2.0
"""What differs between two versions of one definition, as facts and not as text."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qualify.audit import normalise
from qualify.audit.upstream import Function, dotted_name

Definition = Sequence[ast.AST]
_LOGGERS = frozenset({"logger", "logging", "warnings"})


@dataclass(frozen=True)
class Parameter:
    """One parameter as callers see it."""

    name: str
    positional: bool
    default: str | None
    annotation: str


@dataclass(frozen=True)
class Delta:
    """The difference of two definitions of one symbol; empty tuples where there is none.

    Attributes:
        inserted: new positional parameters before an older one: later positional arguments shift.
        required: new parameters without a default.
        optional: new parameters with a default that shift nothing.
        removed: parameters that are gone.
        reordered: whether surviving positional parameters changed order.
        defaults: parameters whose default changed.
        annotations: parameters (or `return`) whose annotation alone changed.
        decorators: decorators gone (`-x`) and new (`+x`).
        bases: bases of a class gone and new.
        arity: numbers of values returned before and after, where they differ.
        calls: what the body calls no longer (`-x`) and newly (`+x`).
        state: attributes of `self` that it assigns no longer and newly.
        refusals: conditions under which it newly raises.
        body: whether the code below the header differs after normalisation.
        cosmetic: the bodies differ in annotations, log lines and messages only.
        value: it is an assignment, not a function or class.
    """

    inserted: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reordered: bool = False
    defaults: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    decorators: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    arity: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    calls: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    body: bool = False
    cosmetic: bool = False
    value: bool = False

    @property
    def header_only_grew(self) -> bool:
        """Whether a call written for the old header still means the same."""
        return not (self.inserted or self.required or self.removed or self.reordered or self.defaults)

    @property
    def new_state(self) -> tuple[str, ...]:
        """Attributes of `self` that only the new body assigns."""
        return tuple(name[1:] for name in self.state if name.startswith("+"))


def compare(old: Definition, new: Definition) -> Delta:
    """The facts between two definitions that exist."""
    before, after = old[-1], new[-1]
    if isinstance(before, ast.ClassDef) and isinstance(after, ast.ClassDef):
        return _classes(before, after)
    if not isinstance(before, Function) or not isinstance(after, Function):
        return Delta(body=normalise.digest(old) != normalise.digest(new), value=True)
    return _functions(before, after, body=_body_digest(old) != _body_digest(new))


def _classes(before: ast.ClassDef, after: ast.ClassDef) -> Delta:
    keywords = [[ast.unparse(k) for k in node.keywords] for node in (before, after)]
    bases = [[ast.unparse(b) for b in node.bases] for node in (before, after)]
    return Delta(
        decorators=signed(_decorators(before), _decorators(after)),
        bases=signed(bases[0] + keywords[0], bases[1] + keywords[1]),
        body=_body_digest([before]) != _body_digest([after]),
    )


def _functions(before: Function, after: Function, *, body: bool) -> Delta:
    old, new = {p.name: p for p in parameters(before)}, {p.name: p for p in parameters(after)}
    added = [p for p in new.values() if p.name not in old]
    last_kept = max((i for i, p in enumerate(new.values()) if p.name in old and p.positional), default=-1)
    inserted = [
        p.name for i, p in enumerate(new.values()) if p.name not in old and p.positional and i < last_kept
    ]
    kept = [name for name in old if name in new]
    positional = [[n for n, p in side.items() if n in kept and p.positional] for side in (old, new)]
    returns = [ast.unparse(n.returns) if n.returns else "" for n in (before, after)]
    arities = arity(before), arity(after)
    return Delta(
        inserted=tuple(inserted),
        required=tuple(p.name for p in added if p.default is None and p.name not in inserted),
        optional=tuple(p.name for p in added if p.default is not None and p.name not in inserted),
        removed=tuple(name for name in old if name not in new),
        reordered=positional[0] != positional[1],
        defaults=tuple(n for n in kept if old[n].default != new[n].default),
        annotations=tuple(n for n in kept if old[n].annotation != new[n].annotation)
        + (("return",) if returns[0] != returns[1] else ()),
        decorators=signed(_decorators(before), _decorators(after)),
        arity=arities if all(arities) and arities[0] != arities[1] else None,
        calls=signed(_calls(before), _calls(after)) if body else (),
        state=signed(_state(before), _state(after)) if body else (),
        refusals=_newly(_refusals(before), _refusals(after)) if body else (),
        body=body,
        cosmetic=body and normalise.digest([_plain(before)]) == normalise.digest([_plain(after)]),
    )


def parameters(node: Function) -> list[Parameter]:
    """Parameters in order, without `self` or `cls`; `*args` and `**kwargs` keep their stars."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    found = [
        _parameter(a, d, positional=True)
        for a, d in zip(positional, [*missing, *arguments.defaults], strict=True)
    ]
    if arguments.vararg:
        found.append(Parameter("*" + arguments.vararg.arg, False, "", _text(arguments.vararg.annotation)))
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [_parameter(a, d, positional=False) for a, d in keyword]
    if arguments.kwarg:
        found.append(Parameter("**" + arguments.kwarg.arg, False, "", _text(arguments.kwarg.annotation)))
    return found[1:] if found and found[0].name in ("self", "cls") else found


def _parameter(node: ast.arg, default: ast.expr | None, *, positional: bool) -> Parameter:
    return Parameter(node.arg, positional, _text(default) if default else None, _text(node.annotation))


def _text(node: ast.expr | None) -> str:
    return ast.unparse(node) if node else ""


def arity(node: Function) -> tuple[int, ...]:
    """How many values its own `return` statements hand back: the sizes seen, sorted; (1,) for no tuple."""
    found = {
        len(n.value.elts) if isinstance(n.value, ast.Tuple) else 1
        for n in own(node)
        if isinstance(n, ast.Return) and n.value is not None
    }
    return tuple(sorted(found))


def own(node: Function) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions defined in it."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        inner = waiting.pop()
        yield inner
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(inner))


def _decorators(node: Function | ast.ClassDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _calls(node: Function) -> list[str]:
    names = [dotted_name(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
    return [name for name in names if name and name.split(".")[0] not in _LOGGERS]


def _state(node: Function) -> list[str]:
    found: list[str] = []
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and dotted_name(inner.value) == "self"
        ):
            found.append(inner.attr)
    return found


def _refusals(node: Function) -> list[str]:
    """Conditions of `assert`, and of an `if` that only raises."""
    found = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert):
            found.append(f"not ({ast.unparse(inner.test)})")
        elif isinstance(inner, ast.If) and isinstance(inner.body[-1], ast.Raise):
            found.append(ast.unparse(inner.test))
    return found


def _newly(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """What is new, if there is more of it than before (a reworded condition is no new one)."""
    return tuple(n for n in new if n not in old) if len(new) > len(old) else ()


def signed(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """What is gone (`-x`) and what is new (`+x`), each once."""
    gone, come = Counter(old) - Counter(new), Counter(new) - Counter(old)
    only_moved = set(gone) & set(come)
    return (
        *(f"-{name}" for name in dict.fromkeys(old) if name in gone and name not in only_moved),
        *(f"+{name}" for name in dict.fromkeys(new) if name in come and name not in only_moved),
    )


def _body_digest(nodes: Definition) -> str:
    """Digest of what lies below the header."""
    parts: list[ast.AST] = []
    for node in nodes:
        parts += [s for s in vars(node).get("body", [node]) if not normalise.is_text(s)]
    return normalise.digest(parts)


class _Plain(ast.NodeTransformer):
    """Drops annotations, log lines and the text of messages."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.Assign(targets=[node.target], value=self.visit(node.value), lineno=node.lineno)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        call = node.value
        if isinstance(call, ast.Call) and dotted_name(call.func).split(".")[0] in _LOGGERS:
            return None
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant(value="")


def _plain(node: Function) -> ast.AST:
    copy = ast.parse(ast.unparse(node)).body[0]
    if isinstance(copy, ast.FunctionDef | ast.AsyncFunctionDef):
        copy.args.defaults, copy.args.kw_defaults, copy.returns, copy.decorator_list = [], [], None, []
        copy.args = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    plain: ast.AST = _Plain().visit(copy)
    return plain
