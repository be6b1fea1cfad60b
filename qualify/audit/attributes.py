# SPDX-License-Identifier: Apache-2.0
"""Every attribute of a vLLM object that our code reads, assigns or deletes, as the type checker sees it.

mypy runs twice: once as `nox -s typecheck` does, which fills (or finds) its cache, then over our files
alone with the types of all expressions kept. What it complains about is that session's business. An object
whose type mypy does not know would go unseen; so an attribute read from an untyped expression that began at
a vLLM object is a finding too.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mypy import build, nodes, types
from mypy.errors import CompileError
from mypy.main import process_options
from mypy.modulefinder import BuildSource
from mypy.options import Options

from qualify.audit.sources import Package, SourceFile
from qualify.audit.symbols import How, Symbol, Use, belongs, is_private
from qualify.audit.upstream import Upstream
from qualify.lint.findings import Finding

# Attributes of mypy's nodes that lead out of the syntax tree, to what a name refers to.
_REFERENCES = frozenset(
    {"node", "info", "type", "unanalyzed_type", "names", "imports", "alias_deps", "module_refs", "def_var"}
    | {"var", "original_def", "type_guard", "type_is", "metaclass", "plugin_deps", "raw_data", "expanded"}
)
_PROBES = frozenset({"builtins.getattr", "builtins.setattr", "builtins.delattr", "builtins.hasattr"})
_PATCHED_CLASS = "assigns an attribute of the vLLM class or module itself"


@dataclass(frozen=True)
class Base:
    """What an attribute is taken from: an instance, a class or a module; or something mypy has no type for."""

    kind: str
    info: nodes.TypeInfo | None = None
    module: str = ""


def uses(package: Package, upstream: Upstream, config: Path, cache: Path | None) -> Iterator[Use | Finding]:
    """All uses, a finding for each patch and for each read that has no type."""
    result = _checked(package, config, cache)
    for source in package:
        tree = result.files.get(source.module.name)
        if tree is not None:
            yield from _File(source, upstream, result.types).uses(tree)


def _checked(package: Package, config: Path, cache: Path | None) -> build.BuildResult:
    options = _options(config, cache)
    plain = [BuildSource(str(s.module.path), s.module.name, None) for s in package]
    working = os.getcwd()
    os.chdir(package.root)  # mypy's cache is keyed by relative paths
    try:
        build.build(plain, options)
        options = _options(config, cache)
        options.export_types = True
        options.preserve_asts = True
        given = [BuildSource(str(s.module.path), s.module.name, s.text) for s in package]
        return build.build(given, options)
    except CompileError as error:
        raise RuntimeError("mypy cannot read the package:\n" + "\n".join(error.messages)) from error
    finally:
        os.chdir(working)


def _options(config: Path, cache: Path | None) -> Options:
    _, options = process_options(["--config-file", str(config)], require_targets=False)
    options.check_untyped_defs = True
    if cache is not None:
        options.cache_dir = str(cache)
    return options


class _File:
    """The uses in one file."""

    def __init__(
        self, source: SourceFile, upstream: Upstream, known: dict[nodes.Expression, types.Type]
    ) -> None:
        self._source = source
        self._upstream = upstream
        self._known = known
        self._stored = {
            _place(n): n.ctx for n in ast.walk(source.module.tree) if isinstance(n, ast.Attribute)
        }

    def uses(self, tree: nodes.MypyFile) -> Iterator[Use | Finding]:
        """Walk the tree."""
        for node in _walk(tree.defs, set()):
            if isinstance(node, nodes.MemberExpr):
                yield from self._member(node)
            elif isinstance(node, nodes.SuperExpr) and node.info is not None:
                yield from self._use(_above(node.info, node.name), node.name, How.READ, node.line)
            elif (
                isinstance(node, nodes.CallExpr)
                and isinstance(node.callee, nodes.NameExpr)
                and node.callee.fullname in _PROBES
            ):
                yield from self._probe(node, node.callee.name)

    def _member(self, node: nodes.MemberExpr) -> Iterator[Use | Finding]:
        context = self._stored.get((node.line, node.column, node.end_line, node.end_column))
        how = How.WRITE if isinstance(context, ast.Store | ast.Del) else How.READ
        yield from self._access(node.expr, node.name, how, node.line)

    def _probe(self, node: nodes.CallExpr, function: str) -> Iterator[Use | Finding]:
        how = How.WRITE if function in {"setattr", "delattr"} else How.READ
        target, name = node.args[0], node.args[1] if len(node.args) > 1 else None
        if isinstance(name, nodes.StrExpr):
            yield from self._access(target, name.value, how, node.line)
            return
        for base in self._bases(target):
            owner = _vllm_class(base)
            if owner is not None or belongs(base.module, "vllm"):
                what = owner.fullname if owner else base.module
                yield self._finding(
                    node.line, "attribute", f"{function} with a computed name on {what}: name the attribute"
                )

    def _access(self, target: nodes.Expression, name: str, how: How, line: int) -> Iterator[Use | Finding]:
        for base in self._bases(target):
            if base.kind == "any":
                if self._began_upstream(target):
                    yield self._finding(
                        line,
                        "attribute",
                        f"`.{name}` is taken from an expression of vLLM's that has no type: give it one, so that "
                        "the audit can tell what is used",
                    )
            elif base.kind == "module":
                yield from self._module_access(base.module, name, how, line)
            elif base.info is not None:
                if how is How.WRITE and base.kind == "class" and _vllm_class(base):
                    yield self._finding(line, "patch", f"{_PATCHED_CLASS} {base.info.fullname}.{name}")
                elif how is How.WRITE and name in {"__class__", "__dict__"} and _vllm_class(base):
                    yield self._finding(
                        line, "patch", f"assigns {name} of a vLLM object ({base.info.fullname})"
                    )
                yield from self._use(_defining(base.info, name), name, how, line)

    def _module_access(self, module: str, name: str, how: How, line: int) -> Iterator[Use | Finding]:
        if how is How.WRITE and belongs(module, "vllm"):
            yield self._finding(line, "patch", f"{_PATCHED_CLASS} {module}.{name}")
        elif belongs(module, "vllm"):
            symbol = self._upstream.resolve(module, name)
            if symbol is not None:
                yield Use(symbol, how, self._source.path, line)

    def _use(self, owner: nodes.TypeInfo | None, name: str, how: How, line: int) -> Iterator[Use | Finding]:
        if owner is None or name in {
            "__class__",
            "__dict__",
            "__name__",
            "__qualname__",
            "__module__",
            "__doc__",
        }:
            return
        symbol = Symbol(owner.module_name, owner.fullname[len(owner.module_name) + 1 :]).member(name)
        if symbol.upstream or is_private(name):
            if how is How.WRITE and _is_function(owner, name):
                yield self._finding(line, "patch", f"assigns over the method {symbol} of a vLLM object")
            yield Use(symbol, how, self._source.path, line)

    def _bases(self, expression: nodes.Expression) -> list[Base]:
        if isinstance(expression, nodes.RefExpr) and isinstance(expression.node, nodes.MypyFile):
            return [Base("module", module=expression.node.fullname)]
        known = self._known.get(expression)
        return list(_classified(known)) if known is not None else []

    def _began_upstream(self, expression: nodes.Expression) -> bool:
        """Whether an untyped expression was taken from a typed vLLM object."""
        while True:
            if isinstance(expression, nodes.MemberExpr):
                inner = expression.expr
            elif isinstance(expression, nodes.CallExpr):
                inner = expression.callee
            elif isinstance(expression, nodes.IndexExpr):
                inner = expression.base
            else:
                return False
            if any(_vllm_class(base) or belongs(base.module, "vllm") for base in self._bases(inner)):
                return True
            expression = inner

    def _finding(self, line: int, rule: str, message: str) -> Finding:
        return Finding(self._source.path, line, rule, message)


def _walk(value: object, seen: set[int]) -> Iterator[nodes.Node]:
    """Every node of a mypy tree; mypyc's visitors cannot be subclassed, its attribute lists can be read."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item, seen)
    elif isinstance(value, nodes.Node) and id(value) not in seen:
        seen.add(id(value))
        yield value
        for name in _attributes(type(value)):
            if name not in _REFERENCES:
                yield from _walk(getattr(value, name), seen)


def _attributes(kind: type) -> Iterable[str]:
    listed: tuple[str, ...] = vars(kind)["__mypyc_attrs__"]
    return (name for name in listed if not name.startswith("__"))


def _place(node: ast.expr) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _classified(given: types.Type) -> Iterator[Base]:
    known = types.get_proper_type(given)
    if isinstance(known, types.UnionType):
        for item in known.items:
            yield from _classified(item)
    elif isinstance(known, types.AnyType):
        yield Base("any")
    elif isinstance(known, types.Instance):
        yield Base("instance", known.type)
    elif isinstance(known, types.TypeVarType):
        yield from _classified(known.upper_bound)
    elif isinstance(known, types.TypeType):
        yield from (Base("class", base.info) for base in _classified(known.item))
    elif isinstance(known, types.FunctionLike) and known.is_type_obj():
        yield Base("class", known.type_object())
    elif isinstance(known, types.TupleType):
        yield Base("instance", known.partial_fallback.type)
    elif isinstance(known, types.LiteralType | types.TypedDictType):
        yield Base("instance", known.fallback.type)


def _vllm_class(base: Base) -> nodes.TypeInfo | None:
    """The nearest vLLM class among a base's ancestors, when nothing of ours stands before it on purpose."""
    if base.info is None:
        return None
    return base.info if belongs(base.info.module_name, "vllm") else None


def _defining(info: nodes.TypeInfo, name: str) -> nodes.TypeInfo | None:
    """The nearest class of vLLM or torch that defines an attribute."""
    for ancestor in info.mro:
        if name in ancestor.names and ancestor.module_name.split(".")[0] in {"vllm", "torch"}:
            return ancestor
    return None


def _above(info: nodes.TypeInfo, name: str) -> nodes.TypeInfo | None:
    for ancestor in info.mro[1:]:
        if name in ancestor.names and ancestor.module_name.split(".")[0] in {"vllm", "torch"}:
            return ancestor
    return None


def _is_function(owner: nodes.TypeInfo, name: str) -> bool:
    node = owner.names[name].node
    if isinstance(node, nodes.Decorator):
        return not node.func.is_property
    return isinstance(node, nodes.FuncDef | nodes.OverloadedFuncDef) and not node.is_property
