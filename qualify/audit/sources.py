# SPDX-License-Identifier: Apache-2.0
"""Our own package as syntax trees, and what its names refer to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from qualify.audit.symbols import Symbol
from qualify.audit.upstream import Module, Upstream, absolute, bound, dotted_name, flat


@dataclass
class SourceFile:
    """One module of ours. `imported` maps a local name to the dotted path it was imported from."""

    path: str
    text: str
    module: Module
    imported: dict[str, str] = field(default_factory=dict)


class Package:
    """All modules of one package of ours, below `root` (the checkout)."""

    def __init__(self, root: Path, package: str) -> None:
        self.root = root
        self.name = package
        self.files: dict[str, SourceFile] = {}
        for path in sorted((root / package).rglob("*.py")):
            source = _read(root, path)
            self.files[source.module.name] = source

    def __iter__(self) -> Iterator[SourceFile]:
        return iter(self.files.values())

    def classes(self) -> Iterator[tuple[SourceFile, Symbol, ast.ClassDef]]:
        """Every class, wherever it is written."""
        for source in self:
            for node in ast.walk(source.module.tree):
                if isinstance(node, ast.ClassDef):
                    yield source, Symbol(source.module.name, node.name), node

    def resolve(self, source: SourceFile, expression: ast.expr, upstream: Upstream) -> Symbol | None:
        """What a dotted name in one of our files refers to: a definition of ours or of an upstream tree."""
        if isinstance(expression, ast.Subscript):
            expression = expression.value
        dotted = dotted_name(expression)
        if not dotted:
            return None
        first, _, rest = dotted.partition(".")
        if first in source.imported:
            return self.resolve_dotted(f"{source.imported[first]}.{rest}".rstrip("."), upstream)
        if any(not isinstance(s, ast.Import | ast.ImportFrom) for s in source.module.names.get(first, [])):
            return Symbol(source.module.name, dotted)
        return None

    def resolve_dotted(self, dotted: str, upstream: Upstream) -> Symbol | None:
        """The definition behind a dotted path, through our own re-exports."""
        if not dotted.startswith(self.name + "."):
            return upstream.resolve_dotted(dotted)
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            source = self.files.get(".".join(parts[:cut]))
            if source is None:
                continue
            rest = parts[cut:]
            if rest and rest[0] in source.imported:
                return self.resolve_dotted(".".join([source.imported[rest[0]], *rest[1:]]), upstream)
            return Symbol(source.module.name, ".".join(rest))
        return None


def _read(root: Path, path: Path) -> SourceFile:
    relative = path.relative_to(root)
    parts = relative.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text(encoding="utf-8")
    module = Module(name, path, ast.parse(text, str(relative)))
    for statement in flat(module.tree.body):
        for bound_name in bound(statement):
            module.names.setdefault(bound_name, []).append(statement)
    source = SourceFile(relative.as_posix(), text, module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                source.imported[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                source.imported[alias.asname or alias.name] = f"{absolute(module, node)}.{alias.name}"
    return source
