# SPDX-License-Identifier: Apache-2.0
"""What the entries of the registry point at: tests that exist, ids that are unique, texts that say something."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from afd_plugin.seams.schema import Registry, Seam, Surface
from qualify.lint.findings import Finding


def check(registry: Registry, root: Path) -> Iterator[Finding]:
    """A finding for each reference that leads nowhere and each entry that leaves something out."""
    for id_, count in Counter(entry.id for entry in registry).items():
        if count > 1:
            yield _finding(id_, f"{count} entries have this id")
    owners = Counter((s.owner, name) for s in registry.surfaces for name in s.names)
    for (owner, name), count in owners.items():
        if count > 1:
            yield _finding(owner, f"{name} stands in {count} surfaces")
    for entry in registry:
        yield from _check_entry(entry, root)


def _check_entry(entry: Seam | Surface, root: Path) -> Iterator[Finding]:
    if len(entry.invariant) < 20 or not entry.plan:
        yield _finding(entry.id, "says too little: state the invariant and the plan in a sentence each")
    tests = {"afd_tests": entry.afd_tests}
    if isinstance(entry, Seam):
        tests["native_tests"] = entry.native_tests
    for field, names in tests.items():
        if not names:
            yield _finding(entry.id, f"{field} is empty: name a test that would fail")
        for name in names:
            if not _exists(root, name):
                yield _finding(entry.id, f"{field} names {name}, which does not exist")


def _exists(root: Path, node_id: str) -> bool:
    file, *path = node_id.split("[", 1)[0].split("::")
    if not (root / file).is_file():
        return False
    body: list[ast.stmt] = ast.parse((root / file).read_bytes()).body
    for part in path:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((s for s in body if isinstance(s, kinds) and s.name == part), None)
        if found is None:
            return False
        body = found.body
    return True


def _finding(id_: str, seen: str) -> Finding:
    return Finding("afd_plugin/seams", 1, "reference", f"{id_}: {seen}")
