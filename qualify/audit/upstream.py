# SPDX-License-Identifier: Apache-2.0
"""The installed sources of vLLM and torch, read as syntax trees and never imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qualify.audit.symbols import Symbol

Function = ast.FunctionDef | ast.AsyncFunctionDef
_MAX_HOPS = 12


class UpstreamError(RuntimeError):
    """An upstream source tree is not there."""


@dataclass
class Module:
    """One parsed module; `names` maps each top-level name to the statements that bind it, in order."""

    name: str
    path: Path
    tree: ast.Module
    names: dict[str, list[ast.stmt]] = field(default_factory=dict)

    @property
    def is_package(self) -> bool:
        """Whether it may have submodules."""
        return self.path.stem == "__init__"


class Upstream:
    """Source trees by top-level package; modules are parsed when first asked for."""

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self._roots = dict(roots)
        self._modules: dict[str, Module | None] = {}

    @classmethod
    def installed(cls, vllm_root: Path | None = None) -> Upstream:
        """vLLM and torch of this environment, or an unpacked vLLM in `vllm_root` (the folder called vllm)."""
        roots = {"torch": package_root("torch"), "vllm": vllm_root or package_root("vllm")}
        if not (roots["vllm"] / "__init__.py").is_file():
            raise UpstreamError(
                f"{roots['vllm']} holds no vLLM package: give --vllm-root the folder named vllm"
            )
        return cls(roots)

    def root(self, package: str) -> Path:
        """The folder of a top-level package."""
        return self._roots[package]

    def knows(self, module: str) -> bool:
        """Whether the module belongs to one of the source trees."""
        return module.split(".", 1)[0] in self._roots

    def module(self, name: str) -> Module | None:
        """The parsed module, or None when there is no such source (a stub counts where there is one)."""
        if name not in self._modules:
            path = self._file(name)
            self._modules[name] = _parse(name, path) if path is not None else None
        return self._modules[name]

    def _file(self, name: str) -> Path | None:
        top, *rest = name.split(".")
        if top not in self._roots:
            return None
        place = self._roots[top].joinpath(*rest)
        candidates = [place / "__init__.py", place / "__init__.pyi"]
        if rest:
            candidates[:0] = [place.with_suffix(".py")]
            candidates.append(place.with_suffix(".pyi"))
        return next((path for path in candidates if path.is_file()), None)

    def resolve(self, module: str, qualname: str = "") -> Symbol | None:
        """The definition that `qualname` in `module` refers to, through re-exports; None when there is none."""
        return self._resolve(module, qualname, _MAX_HOPS)

    def _resolve(self, module: str, qualname: str, hops: int) -> Symbol | None:
        source = self.module(module)
        if source is None or hops == 0:
            return None
        if not qualname:
            return Symbol(module)
        first, _, rest = qualname.partition(".")
        for statement in self._preferred(source, first):
            if isinstance(statement, ast.ImportFrom):
                origin = absolute(source, statement)
                original = next(a.name for a in statement.names if (a.asname or a.name) == first)
                found = self._resolve(origin, original, hops - 1)
            elif isinstance(statement, ast.Import):
                found = None
            else:
                found = Symbol(module, first)
            if found is not None:
                return self._within(found, rest, hops)
        if self.module(f"{module}.{first}") is not None:
            return self._resolve(f"{module}.{first}", rest, hops - 1)
        return None

    def _within(self, found: Symbol, rest: str, hops: int) -> Symbol | None:
        if not rest:
            return found
        if not found.qualname:
            return self._resolve(found.module, rest, hops - 1)
        deeper = Symbol(found.module, f"{found.qualname}.{rest}")
        return deeper if self.definition(deeper) else self._inherited(found, rest)

    def _inherited(self, owner: Symbol, name: str) -> Symbol | None:
        return next((a.member(name) for a in self.ancestors(owner) if self.definition(a.member(name))), None)

    @staticmethod
    def _preferred(source: Module, name: str) -> list[ast.stmt]:
        """Bindings of a name: definitions before assignments before imports."""

        def rank(statement: ast.stmt) -> int:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                return 0
            return 2 if isinstance(statement, ast.Import | ast.ImportFrom) else 1

        return sorted(source.names.get(name, []), key=rank)

    def definition(self, symbol: Symbol) -> list[ast.stmt]:
        """The statements that define a symbol: all overloads and conditional variants; empty when undefined."""
        source = self.module(symbol.module)
        if source is None:
            return []
        if not symbol.qualname:
            return list(source.tree.body)
        first, *rest = symbol.qualname.split(".")
        found = [s for s in source.names.get(first, []) if not isinstance(s, ast.Import | ast.ImportFrom)]
        for part in rest:
            found = [m for s in found if isinstance(s, ast.ClassDef) for m in members(s).get(part, [])]
        return found

    def class_of(self, symbol: Symbol) -> ast.ClassDef | None:
        """The class a symbol names, or None."""
        return next((s for s in self.definition(symbol) if isinstance(s, ast.ClassDef)), None)

    def bases(self, symbol: Symbol) -> list[Symbol]:
        """The direct bases of an upstream class that lie in the source trees."""
        node = self.class_of(symbol)
        found = (self.name_in(symbol.module, base) for base in node.bases) if node else ()
        return [base for base in found if base is not None]

    def name_in(self, module: str, expression: ast.expr) -> Symbol | None:
        """What a dotted name (or a generic alias of one) in an upstream module refers to."""
        if isinstance(expression, ast.Subscript):
            expression = expression.value
        dotted = dotted_name(expression)
        source = self.module(module)
        if not dotted or source is None:
            return None
        first, _, rest = dotted.partition(".")
        for statement in source.names.get(first, []):
            if isinstance(statement, ast.Import):
                alias = next(a for a in statement.names if (a.asname or a.name.split(".")[0]) == first)
                return self.resolve_dotted(alias.name + "." + rest if alias.asname else dotted)
        return self.resolve(module, dotted)

    def resolve_dotted(self, dotted: str) -> Symbol | None:
        """The symbol or module that a dotted path names, taking the longest module first."""
        parts = dotted.rstrip(".").split(".")
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            if self.module(module) is not None:
                found = self.resolve(module, ".".join(parts[cut:]))
                if found is not None:
                    return found
        return None

    def ancestors(self, symbol: Symbol) -> list[Symbol]:
        """All bases of a class in linear order: depth first, a shared base after the last class that has it."""
        return linear([symbol], self.bases)[1:]


def linear(start: Sequence[Symbol], bases: Callable[[Symbol], Iterable[Symbol]]) -> list[Symbol]:
    """Classes reachable by `bases`, each after every class that derives from it."""
    order: list[Symbol] = []

    def visit(symbol: Symbol) -> None:
        if symbol in order:
            order.remove(symbol)
        order.append(symbol)
        for base in bases(symbol):
            visit(base)

    for symbol in start:
        visit(symbol)
    return order


@functools.lru_cache(maxsize=8192)
def members(node: ast.ClassDef) -> dict[str, list[ast.stmt]]:
    """What a class defines: methods, class attributes, and `self.x` assignments of its methods.

    Kept per node, since one class is asked for many members: do not change the result.
    """
    found: dict[str, list[ast.stmt]] = {}
    for statement in flat(node.body):
        for name in bound(statement):
            found.setdefault(name, []).append(statement)
    for method in flat(node.body):
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.args.args:
            for name, statement in _assigned_on(method.args.args[0].arg, method):
                if not any(
                    isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef) for s in found.get(name, [])
                ):
                    found.setdefault(name, []).append(statement)
    return found


def _assigned_on(instance: str, method: Function) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        else:
            continue
        for target in (leaf for t in targets for leaf in _leaves(t)):
            if isinstance(target, ast.Attribute) and dotted_name(target.value) == instance:
                yield target.attr, node


def _leaves(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _leaves(element)
    elif isinstance(target, ast.Starred):
        yield from _leaves(target.value)
    else:
        yield target


def flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class body, including those under `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                if part in statement._fields:
                    yield from flat(vars(statement)[part])
            if isinstance(statement, ast.Try):
                for handler in statement.handlers:
                    yield from flat(handler.body)


def bound(statement: ast.stmt) -> Iterator[str]:
    """The names a statement binds in its scope."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import):
        yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.Assign):
        yield from (leaf.id for t in statement.targets for leaf in _leaves(t) if isinstance(leaf, ast.Name))
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def absolute(source: Module, statement: ast.ImportFrom) -> str:
    """The absolute name of the module that an import statement in `source` names."""
    if not statement.level:
        return statement.module or ""
    parts = source.name.split(".")
    base = parts[: len(parts) - statement.level + (1 if source.is_package else 0)]
    return ".".join([*base, statement.module] if statement.module else base)


def dotted_name(expression: ast.expr) -> str:
    """`a.b.c` for a chain of attributes on a name, else the empty string."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute) and (owner := dotted_name(expression.value)):
        return f"{owner}.{expression.attr}"
    return ""


def package_root(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UpstreamError(f"{name} is not installed in this environment ({sys.executable})")
    return Path(spec.submodule_search_locations[0])


def _parse(name: str, path: Path) -> Module:
    module = Module(name, path, ast.parse(path.read_bytes(), str(path)))
    for statement in flat(module.tree.body):
        for bound_name in bound(statement):
            module.names.setdefault(bound_name, []).append(statement)
    return module
