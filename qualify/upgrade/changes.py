# SPDX-License-Identifier: Apache-2.0
"""The symbol-level difference of two whole trees: added, removed, changed, moved, renamed.

Files with equal bytes are never parsed and definitions with equal text are never normalised, so that a full run over
two releases takes seconds. What is left is compared after normalisation (comments, docstrings and layout do not
count).
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import get_context
from pathlib import Path, PurePosixPath

from qualify.audit import normalise
from qualify.audit.symbols import Symbol
from qualify.audit.upstream import Function, bound, flat
from qualify.upgrade.trees import Tree

ALIKE = 0.6
"""Share of words two bodies must have in common to count as one definition that moved or was renamed."""
ALIKE_UNRELATED = 0.75
"""The same for two definitions in one place whose names have nothing in common."""
_SMALL = 12
"""Bodies of fewer words follow their class and are not paired otherwise: they all look alike."""
_WORD = re.compile(r"\w+")


class Kind(str, Enum):
    """What happened to a symbol."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    MOVED = "moved"
    RENAMED = "renamed"


@dataclass(frozen=True)
class Shape:
    """Enough of one definition to recognise it elsewhere. `words` is empty unless the symbol is gone or new."""

    signature: str
    header: str
    body: str
    words: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One symbol that is not what it was. `target` is where a moved or renamed one is now."""

    symbol: Symbol
    kind: Kind
    old: Shape | None
    new: Shape | None
    target: Symbol | None = None
    alike: float = 1.0

    @property
    def parts(self) -> tuple[str, ...]:
        """Which of header and body differ."""
        if self.old is None or self.new is None:
            return ()
        return tuple(
            name
            for name, same in (
                ("signature", self.old.signature == self.new.signature),
                ("header", self.old.header == self.new.header or self.old.signature != self.new.signature),
                ("body", self.old.body == self.new.body),
            )
            if not same
        )


@dataclass(frozen=True)
class TreeDiff:
    """Everything that differs between two trees."""

    changes: Mapping[Symbol, Change]
    modules: Mapping[str, str]
    files: Mapping[str, int]

    def of(self, symbol: Symbol) -> Change | None:
        """The change of a symbol, if any."""
        return self.changes.get(symbol)

    def counts(self) -> dict[str, int]:
        """How many symbols changed in each way."""
        found = Counter(change.kind.value for change in self.changes.values())
        return {kind.value: found[kind.value] for kind in Kind}


def diff(old: Tree, new: Tree, workers: int = 2) -> TreeDiff:
    """Compare two trees; `workers` processes parse the files that differ."""
    names = sorted(set(old.files) | set(new.files))
    jobs = [(name, old.files.get(name), new.files.get(name)) for name in names]
    jobs = [job for job in jobs if not _equal(job[1], job[2])]
    pairs: dict[Symbol, tuple[Shape | None, Shape | None]] = {}
    for found in _mapped(jobs, workers):
        pairs.update(found)
    files = Counter("added" if a is None else "removed" if b is None else "changed" for _, a, b in jobs)
    files["equal"] = len(names) - len(jobs)
    changes = _paired(pairs)
    gone = {_module(name) for name in old.files if name not in new.files}
    return TreeDiff(changes, _moved_modules(changes, gone), dict(files))


Job = tuple[str, Path | None, Path | None]


def _equal(old: Path | None, new: Path | None) -> bool:
    return old is not None and new is not None and old.read_bytes() == new.read_bytes()


def _mapped(jobs: list[Job], workers: int) -> Iterator[dict[Symbol, tuple[Shape | None, Shape | None]]]:
    if workers < 2 or len(jobs) < 64:
        yield from map(compare_files, jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compare_files, jobs, chunksize=16)


def compare_files(job: Job) -> dict[Symbol, tuple[Shape | None, Shape | None]]:
    """The symbols of one file that differ, with both shapes."""
    name, old_path, new_path = job
    module = _module(name)
    old, new = _definitions(old_path), _definitions(new_path)
    found: dict[Symbol, tuple[Shape | None, Shape | None]] = {}
    for qualname in {**old, **new}:
        before, after = old.get(qualname), new.get(qualname)
        if before and after and before[0] == after[0]:
            continue
        lonely = before is None or after is None
        shapes = (
            _shape(*before, lonely=lonely) if before else None,
            _shape(*after, lonely=lonely) if after else None,
        )
        if shapes[0] != shapes[1]:
            found[Symbol(module, qualname)] = shapes
    return found


def _module(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _definitions(path: Path | None) -> dict[str, tuple[str, list[ast.stmt]]]:
    """Functions, class headers, members and values of a file by qualified name, each with its exact text."""
    if path is None:
        return {}
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    found: dict[str, tuple[str, list[ast.stmt]]] = {}

    def visit(body: Iterable[ast.stmt], prefix: str) -> None:
        for statement in flat(list(body)):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            for name in bound(statement):
                text, nodes = found.get(prefix + name, ("", []))
                found[prefix + name] = (text + _text(statement, lines), [*nodes, statement])
            if isinstance(statement, ast.ClassDef):
                visit(statement.body, f"{prefix}{statement.name}.")

    visit(ast.parse(source).body, "")
    return found


def _text(node: ast.stmt, lines: list[str]) -> str:
    """The text of a statement; of a class only its header, since members stand for themselves."""
    if isinstance(node, ast.ClassDef):
        return ast.unparse(normalise.header(node))
    first = node.lineno
    if isinstance(node, Function) and node.decorator_list:
        first = node.decorator_list[0].lineno
    return "\n".join(lines[first - 1 : node.end_lineno])


def _shape(text: str, nodes: list[ast.stmt], *, lonely: bool) -> Shape:
    signature = normalise.signature(nodes)
    if any(isinstance(node, ast.ClassDef) for node in nodes):
        headers = [normalise.header(n) for n in nodes if isinstance(n, ast.ClassDef)]
        return Shape(signature, normalise.digest(headers), "", _words(text, nodes) if lonely else {})
    body = [s for n in nodes for s in vars(n).get("body", [n]) if not normalise.is_text(s)]
    return Shape(signature, "", normalise.digest(body), _words(text, nodes) if lonely else {})


def _words(text: str, nodes: Iterable[ast.stmt]) -> dict[str, int]:
    """The words of a definition; of a class also the names of its members, which say most about it."""
    words = Counter(_WORD.findall(text))
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            words.update(name for s in flat(node.body) for name in bound(s))
    return dict(words)


def _paired(
    pairs: Mapping[Symbol, tuple[Shape | None, Shape | None]],
) -> dict[Symbol, Change]:
    """Removed symbols joined with the added ones that they became."""
    gone = {symbol: old for symbol, (old, new) in pairs.items() if old and not new}
    come = {symbol: new for symbol, (old, new) in pairs.items() if new and not old}
    changes = {
        symbol: Change(symbol, Kind.CHANGED, old, new)
        for symbol, (old, new) in pairs.items()
        if old is not None and new is not None
    }
    offers = _Offers(come)
    for symbol, old in sorted(gone.items(), key=lambda item: item[0].qualname.count(".")):
        found = offers.successor(symbol, old, changes.get(symbol.owner))
        if found is None:
            changes[symbol] = Change(symbol, Kind.REMOVED, old, None)
            continue
        kind = Kind.MOVED if found.qualname == symbol.qualname else Kind.RENAMED
        share = alike(old.words, come[found].words)
        changes[symbol] = Change(symbol, kind, old, come[found], found, share)
    for symbol in offers.left:
        changes[symbol] = Change(symbol, Kind.ADDED, None, come[symbol])
    return changes


class _Offers:
    """The added symbols that a removed one may have become; each is given away once."""

    def __init__(self, come: Mapping[Symbol, Shape]) -> None:
        self.left = dict(come)
        self._by_name: dict[str, list[Symbol]] = defaultdict(list)
        self._by_owner: dict[Symbol, list[Symbol]] = defaultdict(list)
        for symbol in come:
            self._by_name[symbol.name].append(symbol)
            self._by_owner[symbol.owner].append(symbol)

    def successor(self, symbol: Symbol, old: Shape, owner: Change | None) -> Symbol | None:
        """The best one, taken; None when nothing is like it."""
        found = self._follower(symbol, owner) or self._best(symbol, old)
        if found is not None:
            del self.left[found]
        return found

    def _follower(self, symbol: Symbol, owner: Change | None) -> Symbol | None:
        """A member of the same name in the class that its class became."""
        if owner is None or owner.target is None:
            return None
        follower = owner.target.member(symbol.name)
        return follower if follower in self.left else None

    def _best(self, symbol: Symbol, old: Shape) -> Symbol | None:
        if sum(old.words.values()) < _SMALL:
            return None
        candidates = self._by_name[symbol.name] + self._by_owner[symbol.owner]
        depth = symbol.qualname.count(".")
        scores: list[tuple[float, Symbol]] = []
        for candidate in dict.fromkeys(candidates):
            if candidate not in self.left or candidate.qualname.count(".") != depth:
                continue
            share = alike(old.words, self.left[candidate].words)
            related = related_names(symbol.name, candidate.name)
            if share >= (ALIKE if related else ALIKE_UNRELATED):
                scores.append((share + 0.3 * related + 0.2 * (candidate.owner == symbol.owner), candidate))
        return max(scores)[1] if scores else None


def related_names(old: str, new: str) -> bool:
    """Whether one name contains the other, as a renamed definition's mostly does."""
    return old.strip("_").lower() in new.lower() or new.strip("_").lower() in old.lower()


def alike(old: Mapping[str, int], new: Mapping[str, int]) -> float:
    """The share of words that two bodies have in common (1.0 when both are empty)."""
    total = sum((Counter(old) | Counter(new)).values())
    return sum((Counter(old) & Counter(new)).values()) / total if total else 1.0


def _moved_modules(changes: Mapping[Symbol, Change], gone: set[str]) -> dict[str, str]:
    """Modules that are gone, with the module where most of their symbols live on."""
    goals: dict[str, Counter[str]] = defaultdict(Counter)
    for change in changes.values():
        if change.symbol.module in gone:
            goals[change.symbol.module][change.target.module if change.target else ""] += 1
    best = {module: targets.most_common(1)[0][0] for module, targets in sorted(goals.items())}
    return {module: target for module, target in best.items() if target}
