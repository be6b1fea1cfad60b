# SPDX-License-Identifier: Apache-2.0
"""INVENTORY_AFD_CONTRACTS: this project's own seams, features and claims, found by searching its sources.

Nothing here is a hand-made list. Whatever is found is UNKNOWN until evidence proves it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from afd_plugin.seams.schema import Registry, Seam
from qualify.audit import imports, overrides
from qualify.audit.sources import Package
from qualify.audit.symbols import Use
from qualify.audit.upstream import Upstream, dotted_name
from qualify.upgrade import toml
from qualify.upgrade.trees import UNKNOWN

_ENVIRONMENT = re.compile(r"AFD_[A-Z][A-Z0-9_]+")
_CLAIM = re.compile(
    r"\b(supports?|supported|validated|unsupported|equals?|identical|to the bit|bitwise|refuses?|refused|exactly"
    r"|never|no patch\w*|works|serves?)\b",
    re.IGNORECASE,
)
_DOCUMENTS = ("README.md", "docs/*.md", "recipes/*.md")


@dataclass(frozen=True, order=True)
class Item:
    """One thing that this project has or says. `proof` is UNKNOWN, or the evidence that proves it."""

    area: str
    name: str
    where: str
    proof: str = UNKNOWN


def take(root: Path, package: Package, upstream: Upstream, registry: Registry) -> tuple[Item, ...]:
    """Everything found, sorted."""
    found = {
        *_seams(package, upstream, registry),
        *_enums_and_errors(package),
        *_commands(package),
        *_variables(package),
        *_entry_points(root),
        *_files(root),
        *_claims(root),
    }
    return tuple(sorted(found))


def prove(items: Iterable[Item], evidence: Mapping[str, str]) -> tuple[Item, ...]:
    """The items with their proof where `evidence` (name to record) has one."""
    return tuple(replace(item, proof=evidence.get(item.name, item.proof)) for item in items)


def unknown(items: Iterable[Item]) -> dict[str, tuple[int, int]]:
    """For each area how many items there are and how many are UNKNOWN."""
    found: dict[str, tuple[int, int]] = {}
    for item in items:
        total, open_ = found.get(item.area, (0, 0))
        found[item.area] = (total + 1, open_ + (item.proof == UNKNOWN))
    return found


def _seams(package: Package, upstream: Upstream, registry: Registry) -> Iterator[Item]:
    """Uses of upstream in our sources, each with the entry that registers it."""
    entries: dict[str, str] = {}
    for entry in registry:
        if isinstance(entry, Seam):
            entries[entry.symbol] = entry.id
        else:
            entries.update({f"{entry.owner}{_dot(entry.owner)}{name}": entry.id for name in entry.names})
    for use in (*imports.uses(package, upstream), *overrides.uses(package, upstream)):
        if isinstance(use, Use) and use.symbol.upstream:
            registered = entries.get(str(use.symbol), "not registered")
            yield Item("seam", f"{use.how.value} {use.symbol}", f"{use.path} ({registered})")


def _dot(owner: str) -> str:
    return "" if owner.endswith(":") else "."


def _enums_and_errors(package: Package) -> Iterator[Item]:
    """Every choice a configuration offers, and every named refusal."""
    for source, symbol, node in package.classes():
        bases = {dotted_name(base).rpartition(".")[2] for base in node.bases}
        if bases & {"Enum", "IntEnum", "Flag"}:
            for statement in node.body:
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    yield Item("feature", f"{symbol.name}.{statement.targets[0].id}", source.path)
        elif source.module.name == f"{package.name}.errors" or any(
            base.endswith("Refused") for base in bases
        ):
            yield Item("refusal", symbol.name, source.path)
        elif any(base.startswith("AFDConnector") for base in bases):
            yield Item("feature", f"connector {symbol.name}", source.path)
        elif any(base.endswith("Worker") for base in bases):
            yield Item("feature", f"worker {symbol.name}", source.path)


def _commands(package: Package) -> Iterator[Item]:
    for source in package:
        for node in ast.walk(source.module.tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                if dotted_name(call).endswith(".command"):
                    yield Item("feature", f"command {node.name.replace('_', '-')}", source.path)


def _variables(package: Package) -> Iterator[Item]:
    for source in package:
        for node in ast.walk(source.module.tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and _ENVIRONMENT.fullmatch(node.value)
            ):
                yield Item("feature", f"variable {node.value}", source.path)


def _entry_points(root: Path) -> Iterator[Item]:
    project = toml.read(root / "pyproject.toml").get("project", {})
    for name in project.get("scripts", {}):
        yield Item("feature", f"script {name}", "pyproject.toml")
    for group, entries in project.get("entry-points", {}).items():
        for name in entries:
            yield Item("feature", f"entry point {group}:{name}", "pyproject.toml")


def _files(root: Path) -> Iterator[Item]:
    """Native sources, recipes and test folders."""
    for area, pattern in (("native source", "csrc/*"), ("recipe", "recipes/*.md"), ("tests", "tests/*/")):
        for path in sorted(root.glob(pattern)):
            if not path.name.startswith(("_", ".")):
                yield Item(area, path.relative_to(root).as_posix(), path.relative_to(root).as_posix())


def _claims(root: Path) -> Iterator[Item]:
    """Sentences of our documents that promise something."""
    for pattern in _DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            fenced = False
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                fenced ^= line.lstrip().startswith("```")
                if not fenced and not line.startswith("#") and _CLAIM.search(line):
                    yield Item(
                        "claim", line.strip(" |*-")[:160], f"{path.relative_to(root).as_posix()}:{number}"
                    )
