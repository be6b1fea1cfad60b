# SPDX-License-Identifier: Apache-2.0
"""Nothing of vLLM is patched: no assignment onto its modules and classes, no bound replacement, no mocking.

The type checker's half of this scan (objects whose class is only known by type) is in `attributes`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from qualify.audit.sources import Package, SourceFile
from qualify.audit.symbols import How, Symbol, Use
from qualify.audit.upstream import Upstream, dotted_name
from qualify.lint.findings import Finding

RULE = "patch"
_WRITERS = frozenset({"setattr", "delattr", "object.__setattr__", "type.__setattr__", "object.__delattr__"})
_MUTATORS = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem"}
    | {"register", "remove", "reverse", "setdefault", "sort", "update", "__setitem__", "__delitem__"}
)


def uses(package: Package, upstream: Upstream) -> Iterator[Use | Finding]:
    """A finding for each patch, a use for each vLLM container that is changed."""
    for source in package:
        for node in ast.walk(source.module.tree):
            yield from _Scan(source, package, upstream).node(node)


class _Scan:
    def __init__(self, source: SourceFile, package: Package, upstream: Upstream) -> None:
        self._source = source
        self._package = package
        self._upstream = upstream

    def node(self, node: ast.AST) -> Iterator[Use | Finding]:
        if isinstance(node, ast.Assign | ast.Delete):
            for target in node.targets:
                yield from self._target(target)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
            yield from self._target(node.target)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield from self._target(node.optional_vars)
        elif isinstance(node, ast.Call):
            yield from self._call(node)

    def _target(self, target: ast.expr) -> Iterator[Use | Finding]:
        if isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                yield from self._target(element)
        elif isinstance(target, ast.Attribute):
            owner = self._native(target.value)
            if owner is not None:
                yield self._finding(target, f"assigns {owner}'s attribute {target.attr}")
            elif isinstance(target.value, ast.Attribute) and target.value.attr == "__class__":
                yield self._finding(target, f"assigns {target.attr} of an object's class")
            elif target.attr in {"__class__", "__code__", "__wrapped__", "__bases__"}:
                yield self._finding(target, f"assigns {target.attr}")
        elif isinstance(target, ast.Subscript):
            yield from self._subscript(target)

    def _subscript(self, target: ast.Subscript) -> Iterator[Use | Finding]:
        if dotted_name(target.value) == "sys.modules":
            yield self._finding(target, "replaces a module in sys.modules")
            return
        held = target.value
        if (
            isinstance(held, ast.Attribute)
            and held.attr == "__dict__"
            and self._native(held.value) is not None
        ):
            yield self._finding(target, f"writes into the namespace of {self._native(held.value)}")
            return
        if isinstance(held, ast.Call) and dotted_name(held.func) == "vars" and held.args:
            if (owner := self._native(held.args[0])) is not None:
                yield self._finding(target, f"writes into the namespace of {owner}")
            return
        if (container := self._native(held)) is not None:
            yield Use(container, How.MUTATE, self._source.path, target.lineno)

    def _call(self, node: ast.Call) -> Iterator[Use | Finding]:
        name = dotted_name(node.func)
        if name in _WRITERS and node.args and (owner := self._native(node.args[0])) is not None:
            yield self._finding(node, f"{name} on {owner}")
        imported = self._source.imported.get(name.split(".")[0], "")
        full = ".".join([imported, *name.split(".")[1:]]) if imported else name
        if full == "types.MethodType":
            yield self._finding(node, "binds a function to an object by types.MethodType")
        elif full.startswith("unittest.mock.") or full in {"gc.get_referrers", "ctypes.pythonapi"}:
            yield self._finding(node, f"uses {full}")
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            container = self._native(node.func.value)
            if container is not None and self._upstream.class_of(container) is None and container.qualname:
                yield Use(container, How.MUTATE, self._source.path, node.lineno)
            elif (
                isinstance(node.func.value, ast.Attribute)
                and node.func.value.attr == "__dict__"
                and (owner := self._native(node.func.value.value)) is not None
            ):
                yield self._finding(node, f"changes the namespace of {owner}")

    def _native(self, expression: ast.expr) -> Symbol | None:
        """The vLLM module, class or object at module level that a dotted name refers to."""
        symbol = self._package.resolve(self._source, expression, self._upstream)
        return symbol if symbol is not None and symbol.upstream else None

    def _finding(self, node: ast.expr, seen: str) -> Finding:
        return Finding(
            self._source.path,
            node.lineno,
            RULE,
            f"{seen}: vLLM is extended by subclassing, its registries and its hooks, never patched",
        )
