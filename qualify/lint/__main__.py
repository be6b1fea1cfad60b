# SPDX-License-Identifier: Apache-2.0
"""Apply every rule to every tracked file of this checkout."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from qualify.lint import code, text
from qualify.lint.dependencies import dependencies
from qualify.lint.findings import Finding, without_allowed
from qualify.process import CommandError, capture

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = re.compile(r"afd_plugin/.+\.py")
WEIGHTS = re.compile(r"qualify/accuracy/checkpoints/[\w-]+/[\w.-]+\.safetensors")
"""The only files that are not text: trained weights, each of whose digests stands in a `training.json`."""


def tracked(root: Path) -> list[str]:
    """The paths git tracks that still exist, relative to `root`."""
    listed = capture(["git", "ls-files", "-z"], cwd=root).stdout
    return sorted(name for name in listed.split("\0") if name and (root / name).is_file())


def check_python(path: str, source: str) -> list[Finding]:
    """All rules over one Python file; which of them apply depends on the folder."""
    findings = [*text.spdx(path, source), *text.length(path, source)]
    try:
        tree = ast.parse(source, path)
    except SyntaxError as error:
        return [*findings, Finding(path, error.lineno or 1, "syntax", str(error))]
    if path.startswith(("afd_plugin/", "qualify/")) or "/" not in path:
        findings += [*code.probing(path, tree), *code.swallowing(path, tree), *code.waiting(path, tree)]
        findings += code.importing(path, tree)
    if path.startswith("tests/"):
        findings += [*code.sleeping(path, tree), *code.swallowing(path, tree)]
    return findings


def check(root: Path) -> list[Finding]:
    """Every finding in the tracked files under `root`, sorted."""
    names = tracked(root)
    findings = list(text.sizes({name: (root / name).stat().st_size for name in names}))
    contents: dict[str, str] = {}
    for name in names:
        try:
            contents[name] = (root / name).read_bytes().decode()
        except UnicodeDecodeError:
            if WEIGHTS.fullmatch(name):
                continue  # their record names their digests, and the accuracy gate compares them
            findings.append(Finding(name, 1, "binary", "is not text: track what can be reviewed"))
    for name, content in contents.items():
        own = [*text.index_hosts(name, content), *text.machine_paths(name, content)]
        if name.endswith(".py"):
            own += check_python(name, content)
        if name.endswith(".md"):
            own += text.links(name, content, names)
        findings += without_allowed(name, content, own)
    package = {name: source for name, source in contents.items() if PACKAGE.fullmatch(name)}
    findings += dependencies(contents["pyproject.toml"], _parsed(package))
    return sorted([*findings, *text.versions(contents)])


def _parsed(sources: Mapping[str, str]) -> dict[str, ast.AST]:
    trees: dict[str, ast.AST] = {}
    for name, source in sources.items():
        with contextlib.suppress(SyntaxError):  # check_python has reported it
            trees[name] = ast.parse(source, name)
    return trees


def fix(root: Path) -> list[str]:
    """Add the licence line where it is missing; the paths changed."""
    changed = []
    for name in tracked(root):
        if name.endswith(".py"):
            before = (root / name).read_text(encoding="utf-8")
            after = text.with_spdx(before)
            if after != before:
                (root / name).write_text(after, encoding="utf-8")
                changed.append(name)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every finding; exit 1 when there is one."""
    parser = argparse.ArgumentParser(prog="python -m qualify.lint", description=main.__doc__)
    parser.add_argument("--fix", action="store_true", help="add missing licence lines first")
    chosen = parser.parse_args(arguments)
    try:
        for name in fix(ROOT) if chosen.fix else []:
            print(f"fixed {name}")
        findings = check(ROOT)
    except CommandError as error:
        print(error, file=sys.stderr)
        return 2
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings in {len(tracked(ROOT))} tracked files")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
