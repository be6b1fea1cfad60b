# SPDX-License-Identifier: Apache-2.0
"""From the difference of two trees and a list of uses to evidence and a verdict for each use."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from qualify.audit import normalise
from qualify.audit.symbols import Symbol, belongs
from qualify.audit.upstream import Function, Upstream, absolute, dotted_name, members
from qualify.upgrade import callers, facts
from qualify.upgrade.changes import Kind, TreeDiff
from qualify.upgrade.dependencies import Dependency, Use
from qualify.upgrade.rules import Evidence, Verdict, judge
from qualify.upgrade.trees import Tree

_BUILT = frozenset({Use.CALL, Use.READ, Use.SWAP, Use.WRITE})


@dataclass(frozen=True)
class Assessment:
    """One use, what is known about it, and what that means."""

    use: Dependency
    evidence: Evidence
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """Two trees and their difference."""

    old: Tree
    new: Tree
    diff: TreeDiff

    @cached_property
    def names_gone(self) -> frozenset[str]:
        """Members (configuration fields apart) defined in the old tree of which no class has one any more."""
        members_ = {s: c for s, c in self.diff.changes.items() if "." in s.qualname}
        gone = {
            s.name
            for s, c in members_.items()
            if c.kind is Kind.REMOVED and not belongs(s.module, "vllm.config")
        }
        return frozenset(gone - {s.name for s, c in self.diff.changes.items() if c.kind is Kind.ADDED})


def assess(uses: Iterable[Dependency], trees: Comparison) -> tuple[Assessment, ...]:
    """A verdict for every use, in order."""
    listed = tuple(uses)
    places = {use: _places(use, trees) for use in listed}
    asked = {s for use, (old, new) in places.items() for s in (old, new) if s and use.use not in _BUILT}
    delta = callers.compare(asked, trees.old, trees.new)
    found = []
    for use in listed:
        old, new = places[use]
        evidence = _evidence(use, old, new, trees)
        moved = delta.get(new or old or use.symbol, callers.CallerDelta())
        if old == new:
            evidence = dataclasses.replace(evidence, callers=moved)
        found.append(Assessment(use, evidence, judge(use, evidence)))
    return tuple(found)


def locate(tree: Upstream, symbol: Symbol) -> Symbol | None:
    """Where a symbol is defined, also through star imports."""
    found = tree.resolve(symbol.module, symbol.qualname)
    if found is not None or not symbol.qualname:
        return found
    source = tree.module(symbol.module)
    first, _, rest = symbol.qualname.partition(".")
    for statement in source.names.get(first, []) if source else ():
        if isinstance(statement, ast.ImportFrom) and source is not None:
            original = next(a.name for a in statement.names if (a.asname or a.name) == first)
            found = _through_stars(tree, absolute(source, statement), f"{original}.{rest}".rstrip("."))
    return found or _through_stars(tree, symbol.module, symbol.qualname)


def _through_stars(tree: Upstream, module: str, qualname: str) -> Symbol | None:
    source = tree.module(module)
    for statement in source.tree.body if source else ():
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*" and source is not None:
            found = tree.resolve(absolute(source, statement), qualname)
            if found is not None:
                return found
    return None


def _places(use: Dependency, trees: Comparison) -> tuple[Symbol | None, Symbol | None]:
    """Where it was and where it is."""
    old = locate(trees.old.upstream, use.symbol)
    new = locate(trees.new.upstream, use.symbol)
    if old is None or new is not None:
        return old, new
    change = trees.diff.of(old)
    if change is not None and change.target is not None:
        return old, change.target
    return old, locate(trees.new.upstream, old)


def _evidence(use: Dependency, old: Symbol | None, new: Symbol | None, trees: Comparison) -> Evidence:
    importable = locate(trees.new.upstream, use.symbol) is not None
    if old is None or new is None:
        gone_branches = _branches_gone(use, old, trees) if old else ()
        return Evidence(old, new, importable=importable, branches_gone=gone_branches)
    before, after = trees.old.upstream.definition(old), trees.new.upstream.definition(new)
    change = trees.diff.of(old)
    share = change.alike if change is not None and change.target == new else 1.0
    if not new.qualname or not before or not after:
        body = normalise.digest(before) != normalise.digest(after)
        return Evidence(old, new, share, importable, facts.Delta(body=body))
    delta = facts.compare(before, after)
    classes = before[-1], after[-1]
    gone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    changed: tuple[str, ...] = ()
    if isinstance(classes[0], ast.ClassDef) and isinstance(classes[1], ast.ClassDef):
        gone, changed = _members(classes[0], classes[1])
        delta = dataclasses.replace(_constructed(delta, use, classes[0], classes[1]), body=False)
    return Evidence(
        old,
        new,
        share,
        importable,
        delta,
        methods_gone=gone[0],
        state_gone=gone[1],
        members_changed=changed,
        read_elsewhere=_read_elsewhere(new, delta.new_state, trees.new.upstream) if delta.new_state else (),
        asked=_newly_asked(use, trees) if use.use is Use.STUB else (),
        branches_gone=_branches_gone(use, old, trees),
    )


def _members(
    before: ast.ClassDef, after: ast.ClassDef
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], tuple[str, ...]]:
    """Public methods gone and public attributes gone, and all members that differ."""
    old, new = members(before), members(after)
    gone = [n for n in sorted(old) if n not in new and not n.startswith("_")]
    methods = tuple(n for n in gone if isinstance(old[n][-1], ast.FunctionDef | ast.AsyncFunctionDef))
    changed = tuple(
        sorted(n for n in new if n not in old or normalise.digest(old[n]) != normalise.digest(new[n]))
    )
    return (methods, tuple(n for n in gone if n not in methods)), changed


def _constructed(
    delta: facts.Delta, use: Dependency, before: ast.ClassDef, after: ast.ClassDef
) -> facts.Delta:
    """The header of a class as its callers see it: that of its constructor, or a dataclass's fields."""
    sides = [_constructor(node) for node in (before, after)]
    if use.use is Use.STUB or not all(sides):
        return delta
    header = facts.compare(sides[0], sides[1])
    kept = {"decorators": delta.decorators, "bases": delta.bases, "calls": (), "state": (), "arity": None}
    return dataclasses.replace(header, **kept)  # type: ignore[arg-type]


def _constructor(node: ast.ClassDef) -> Sequence[ast.AST]:
    own = next((s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"), None)
    if own is not None:
        return [own]
    if not any("dataclass" in ast.unparse(d) or ast.unparse(d) == "config" for d in node.decorator_list):
        return []
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    text = ", ".join(
        f"{ast.unparse(f.target)}: {ast.unparse(f.annotation)}"
        + (f" = {ast.unparse(f.value)}" if f.value else "")
        for f in sorted(fields, key=lambda f: f.value is not None)
        if "ClassVar" not in ast.unparse(f.annotation)
    )
    return ast.parse(f"def __init__(self, {text}): ...").body


def _read_elsewhere(symbol: Symbol, names: Iterable[str], tree: Upstream) -> tuple[str, ...]:
    """New attributes of `self` and the methods of the class that read them."""
    node = tree.class_of(symbol.owner)
    found = []
    for name in names:
        readers = [m.name for m in _methods(node) if m.name != symbol.name and _reads(m, name)]
        if readers:
            found.append(f"`{name}` is read in {', '.join(readers)}")
    return tuple(found)


def _methods(node: ast.ClassDef | None) -> Iterator[Function]:
    for statement in node.body if node else ():
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement


def _reads(method: Function, name: str) -> bool:
    return any(
        isinstance(n, ast.Attribute) and n.attr == name and isinstance(n.ctx, ast.Load)
        for n in ast.walk(method)
    )


def _newly_asked(use: Dependency, trees: Comparison) -> tuple[str, ...]:
    """What the holder's classes newly ask of the attribute that holds a stub."""
    holder = Symbol.parse(use.holder)
    before, after = (_asked(side.upstream, holder, use.held_as) for side in (trees.old, trees.new))
    return tuple(sorted(after - before))


def _asked(tree: Upstream, holder: Symbol, held_as: str) -> set[str]:
    found: set[str] = set()
    for symbol in (holder, *tree.ancestors(holder)):
        node = tree.class_of(symbol)
        for inner in ast.walk(node) if node else ():
            if isinstance(inner, ast.Attribute) and dotted_name(inner.value) == f"self.{held_as}":
                found.add(inner.attr)
    return found


def _branches_gone(use: Dependency, old: Symbol, trees: Comparison) -> tuple[str, ...]:
    """Attributes of other objects on which native code branched and that nobody defines any more.

    Looked for in what is intercepted or read, or, when the attribute itself is the symbol, in every changed file.
    """
    if not trees.names_gone:
        return ()
    if use.use is Use.READ and old.name in trees.names_gone:
        return (old.name,) if _asked_somewhere(old.name, trees) else ()
    if use.use is Use.CALL:
        return ()
    nodes = trees.old.upstream.definition(old)
    return tuple(sorted({name for node in nodes for name in tested(node)} & trees.names_gone))


def _asked_somewhere(name: str, trees: Comparison) -> bool:
    """Whether native code of a file that changed branched on the attribute."""
    for path, place in trees.old.files.items():
        text = place.read_text(encoding="utf-8")
        if f".{name}" not in text or path not in trees.new.files:
            continue
        if text != trees.new.files[path].read_text(encoding="utf-8") and name in set(tested(ast.parse(text))):
            return True
    return False


def tested(node: ast.AST) -> Iterator[str]:
    """Attributes of other objects than `self` in the conditions of a definition."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.If | ast.IfExp):
            for part in ast.walk(inner.test):
                if isinstance(part, ast.Attribute) and dotted_name(part.value) != "self":
                    yield part.attr
