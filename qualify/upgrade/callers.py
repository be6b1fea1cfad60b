# SPDX-License-Identifier: Apache-2.0
"""Who calls a symbol, with which arguments, and how that differs between two trees.

Calls are matched by name, so a site counts only in a file that also names the symbol's class or module. A string
handed to `collective_rpc` counts too: vLLM's executors call worker methods that way.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from qualify.audit.symbols import Symbol
from qualify.audit.upstream import dotted_name
from qualify.upgrade.trees import Tree

RPC = "(by name)"


@dataclass(frozen=True, order=True)
class Site:
    """One call: the function it stands in, how many positional arguments, which keywords."""

    caller: Symbol
    positional: int
    keywords: tuple[str, ...]


@dataclass(frozen=True)
class CallerDelta:
    """How the native callers of one symbol differ.

    Attributes:
        gone: functions that called it by name (a remote call) and no longer do.
        come: functions that call it by name newly.
        passed: `caller: +keyword` for callers that hand over more, or another number of positional arguments.
    """

    gone: tuple[str, ...] = ()
    come: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()


def called_name(symbol: Symbol) -> str:
    """The name at a call site: of a constructor, its class."""
    return symbol.owner.name if symbol.name == "__init__" else symbol.name


def compare(symbols: Iterable[Symbol], old: Tree, new: Tree) -> dict[Symbol, CallerDelta]:
    """The callers' difference for each symbol; only files that differ between the trees are read."""
    wanted: dict[str, list[Symbol]] = defaultdict(list)
    for symbol in symbols:
        if symbol.qualname:
            wanted[called_name(symbol)].append(symbol)
    before, after = _sites(wanted, old, new), _sites(wanted, new, old)
    return {s: _delta(before.get(s, []), after.get(s, [])) for group in wanted.values() for s in group}


def _delta(before: list[Site], after: list[Site]) -> CallerDelta:
    old, new = _by_caller(before), _by_caller(after)
    passed = []
    for caller in sorted(set(old) & set(new)):
        (old_count, old_words), (new_count, new_words) = old[caller], new[caller]
        passed += [f"{caller.qualname}: +{word}" for word in sorted(new_words - old_words - {RPC})]
        if old_count != new_count:
            passed.append(f"{caller.qualname}: {sorted(old_count)} positional, now {sorted(new_count)}")
    rpc = [{str(site.caller) for site in side if RPC in site.keywords} for side in (before, after)]
    return CallerDelta(tuple(sorted(rpc[0] - rpc[1])), tuple(sorted(rpc[1] - rpc[0])), tuple(passed))


def _by_caller(sites: list[Site]) -> dict[Symbol, tuple[set[int], set[str]]]:
    found: dict[Symbol, tuple[set[int], set[str]]] = {}
    for site in sites:
        counts, words = found.setdefault(site.caller, (set(), set()))
        counts.add(site.positional)
        words.update(site.keywords)
    return found


def _sites(wanted: Mapping[str, list[Symbol]], tree: Tree, other: Tree) -> dict[Symbol, list[Site]]:
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, sorted(wanted)))})\b") if wanted else None
    found: dict[Symbol, list[Site]] = defaultdict(list)
    for name, path in tree.files.items():
        if pattern is None or (name in other.files and path.read_bytes() == other.files[name].read_bytes()):
            continue
        text = path.read_text(encoding="utf-8")
        present = {match[0] for match in pattern.finditer(text)}
        if not present:
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        relevant = {s for n in present for s in wanted[n] if _knows(text, module, s)}
        if not relevant:
            continue
        source = tree.upstream.module(module)
        if source is None:
            continue
        for caller, called, positional, keywords in calls(source.tree):
            for symbol in wanted.get(called, ()):
                if symbol in relevant:
                    found[symbol].append(Site(Symbol(module, caller), positional, keywords))
    return found


def _knows(text: str, module: str, symbol: Symbol) -> bool:
    """Whether a file can mean this symbol by its name: it defines, imports or names its owner."""
    if module == symbol.module:
        return True
    owner = symbol.owner.name or symbol.module.rpartition(".")[2]
    if f"class {owner}(" in text or f"class {owner}:" in text:
        return False  # another class of the same name
    return re.search(rf"\b{re.escape(owner)}\b", text) is not None or f'"{symbol.name}"' in text


def calls(tree: ast.Module) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    """Each call as (enclosing function, called name, positional arguments, keywords)."""
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, scope = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = f"{scope}.{node.name}".lstrip(".")
        elif isinstance(node, ast.Call):
            called = dotted_name(node.func).rpartition(".")[2]
            if not called and isinstance(node.func, ast.Attribute):
                called = node.func.attr
            stars = any(isinstance(a, ast.Starred) for a in node.args)
            keywords = tuple(sorted(k.arg or "**" for k in node.keywords))
            yield scope, called, -1 if stars else len(node.args), keywords
            for argument in node.args[:1] if called.endswith("rpc") else ():
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield scope, argument.value, 0, (RPC,)
        waiting.extend((child, scope) for child in ast.iter_child_nodes(node))
