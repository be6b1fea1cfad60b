# SPDX-License-Identifier: Apache-2.0
"""Every class of ours that derives from a vLLM class, and everything it defines again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from qualify.audit.sources import Package, SourceFile
from qualify.audit.symbols import How, Symbol, Use
from qualify.audit.upstream import Upstream, linear, members
from qualify.lint.findings import Finding

_OWN_CONSTRUCTION = frozenset({"__module__", "__qualname__", "__slots__", "__annotations__"})


class Hierarchy:
    """The classes of our package and, above them, those of the upstream trees."""

    def __init__(self, package: Package, upstream: Upstream) -> None:
        self._package = package
        self._upstream = upstream
        self.ours = {symbol: (source, node) for source, symbol, node in package.classes()}

    def bases(self, symbol: Symbol) -> list[Symbol]:
        """Direct bases, where they can be found."""
        if symbol not in self.ours:
            return self._upstream.bases(symbol)
        source, node = self.ours[symbol]
        found = (self._package.resolve(source, base, self._upstream) for base in node.bases)
        return [base for base in found if base is not None]

    def order(self, symbol: Symbol) -> list[Symbol]:
        """A class and everything above it, nearest first."""
        return linear([symbol], self.bases)

    def members(self, symbol: Symbol) -> dict[str, list[ast.stmt]]:
        """What a class defines itself."""
        node = self.ours[symbol][1] if symbol in self.ours else self._upstream.class_of(symbol)
        return members(node) if node else {}


def uses(package: Package, upstream: Upstream) -> Iterator[Use | Finding]:
    """A use for each vLLM base and each redefinition, a finding for each incompatible signature."""
    hierarchy = Hierarchy(package, upstream)
    seen: set[Use | Finding] = set()
    for symbol, (source, node) in hierarchy.ours.items():
        order = hierarchy.order(symbol)
        for base in hierarchy.bases(symbol):
            if base.upstream:
                seen.add(Use(base, How.SUBCLASS, source.path, node.lineno))
        native = [s for s in order if s.upstream]
        if native:
            # a mix-in of ours overrides through the class that joins it with the native one
            for own in (s for s in order if s in hierarchy.ours):
                seen.update(_redefinitions(hierarchy, own, native))
    yield from seen


def _redefinitions(hierarchy: Hierarchy, own: Symbol, native: list[Symbol]) -> Iterator[Use | Finding]:
    source, _ = hierarchy.ours[own]
    for name, statements in hierarchy.members(own).items():
        if name in _OWN_CONSTRUCTION:
            continue
        base = next((s for s in native if name in hierarchy.members(s)), None)
        if base is None:
            continue
        yield from _redefinition(hierarchy, source, name, statements, base)


def _redefinition(
    hierarchy: Hierarchy, source: SourceFile, name: str, statements: list[ast.stmt], base: Symbol
) -> Iterator[Use | Finding]:
    upstream_statements = hierarchy.members(base)[name]
    for statement in statements:
        how = How.OVERRIDE
        if isinstance(statement, ast.AnnAssign) and statement.value is None:
            how = How.READ  # a declaration only tells the type checker what the base has
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and not _in_body(
            hierarchy, source, statement
        ):
            how = How.WRITE  # an assignment to self, which the type checker sees too
        yield Use(base.member(name), how, source.path, statement.lineno)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            fault = incompatibility(statement, upstream_statements[-1])
            if fault:
                yield Finding(
                    source.path,
                    statement.lineno,
                    "override",
                    f"{name} overrides {base.member(name)} but {fault}: native callers may fail",
                )


def _in_body(hierarchy: Hierarchy, source: SourceFile, statement: ast.stmt) -> bool:
    return any(statement in node.body for where, node in hierarchy.ours.values() if where is source)


def incompatibility(own: ast.stmt, native: ast.stmt) -> str:
    """Why calls written for `native` may not work on `own`; empty when they do."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    if not isinstance(own, functions):
        return ""
    if not isinstance(native, functions):
        return "" if "property" in _decorators(own) else "is a method where upstream has an attribute"
    if isinstance(own, ast.AsyncFunctionDef) != isinstance(native, ast.AsyncFunctionDef):
        return "only one of the two is async"
    special = {"property", "staticmethod", "classmethod", "cached_property"}
    if _decorators(own) & special != _decorators(native) & special:
        return f"is decorated by {sorted(_decorators(own))}, upstream by {sorted(_decorators(native))}"
    if own.name == "__init__":
        return ""
    return _argument_fault(own.args, native.args)


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}


def _argument_fault(own: ast.arguments, native: ast.arguments) -> str:
    own_positional = [a.arg for a in (*own.posonlyargs, *own.args)]
    native_positional = [a.arg for a in (*native.posonlyargs, *native.args)]
    own_keywords = {a.arg for a in own.kwonlyargs}
    for index, name in enumerate(native_positional[1:], start=1):
        if index < len(own_positional):
            if own_positional[index] != name:
                return f"its argument {index} is `{own_positional[index]}`, upstream `{name}`"
        elif not (own.kwarg or name in own_keywords):
            return f"it does not take `{name}`"
    for name in (a.arg for a in native.kwonlyargs):
        if name not in own_keywords and name not in own_positional and not own.kwarg:
            return f"it does not take `{name}`"
    if native.vararg and not own.vararg:
        return f"it does not take `*{native.vararg.arg}`"
    if native.kwarg and not own.kwarg:
        return f"it does not take `**{native.kwarg.arg}`"
    required = own_positional[len(native_positional) : len(own_positional) - len(own.defaults)]
    extra = [n for n in required if n not in {a.arg for a in native.kwonlyargs} and not native.vararg]
    extra += [
        a.arg
        for a, default in zip(own.kwonlyargs, own.kw_defaults, strict=True)
        if default is None and a.arg not in {*native_positional, *(k.arg for k in native.kwonlyargs)}
    ]
    return f"it requires `{extra[0]}`, which upstream does not pass" if extra else ""
