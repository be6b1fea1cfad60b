# SPDX-License-Identifier: Apache-2.0
"""Which test cases a session must run: one tracked list per suite, and what is wrong with a run against it.

A line of a list is a test function and how many cases its parameters make. A case that is missing, skipped,
expected to fail or not listed is a fault. A list may shrink only for a reason: a function that the last release
ran more of must stand in `retired.txt` with a word on why.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from qualify.ledger import Counts
from qualify.process import capture, clean_environment
from qualify.sharding import Cases

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = "qualify/cases"
ALL = ("--full",)
SUITES = {
    "unit": ("tests/unit",),
    "e2e": ("tests/e2e",),
    "e2e_all": ("tests/e2e", *ALL),
    "gpu_e2e": ("tests/gpu_e2e",),
    "gpu_e2e_all": ("tests/gpu_e2e", *ALL),
    "gpu_e2e_x2": ("tests/gpu_e2e", "--gpus=2"),
    "gpu_e2e_x2_all": ("tests/gpu_e2e", "--gpus=2", *ALL),
}
"""What pytest is given for each suite; `_all` is the full scope that the qualifying chain runs."""

RETIRED = "retired.txt"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What `qualify.collected` (a pytest plugin) wrote about one run. Outcomes by node id."""

    collected: tuple[str, ...]
    deselected: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    outcomes: Mapping[str, str] = {}
    exit_status: int

    def counts(self) -> Counts:
        """The numbers of a record."""
        values = list(self.outcomes.values())
        return Counts(
            collected=len(self.collected),
            passed=values.count("passed"),
            failed=values.count("failed"),
            error=values.count("error") + len(self.broken),
            skipped=values.count("skipped"),
            xfailed=values.count("xfailed") + values.count("xpassed"),
        )


def by_function(cases: Iterable[str]) -> Cases:
    """Node ids counted by their function."""
    return Counter(case.partition("[")[0] for case in cases)


def render(cases: Cases) -> str:
    """A list as it is tracked: one function and its number of cases a line, sorted."""
    return "".join(f"{name} {count}\n" for name, count in sorted(cases.items()))


def parse(text: str) -> Cases:
    """What `render` wrote."""
    pairs = (line.rpartition(" ") for line in text.splitlines())
    return {name: int(count) for name, _, count in pairs}


def digest(cases: Cases) -> str:
    """One SHA-256 of a list."""
    return hashlib.sha256(render(cases).encode()).hexdigest()


def listed(suite: str, root: Path = ROOT) -> Cases:
    """The cases that a suite must run; empty when the suite has no list."""
    path = root / DIRECTORY / f"{suite}.txt"
    return parse(path.read_text(encoding="utf-8")) if path.is_file() else {}


def complaints(run: Run, expected: Cases) -> tuple[str, ...]:
    """One sentence for each way in which a run is not all of `expected`, passed."""
    seen = by_function(run.collected)
    said = [f"{name} could not be collected" for name in run.broken]
    for name in sorted(set(seen) | set(expected)):
        have, want = seen.get(name, 0), expected.get(name, 0)
        if have < want:
            said.append(f"{name}: {want} cases are expected, {have} were collected")
        elif have > want:
            said.append(f"{name}: {have} cases, the list has {want} (`nox -s cases` renews it)")
    for case in sorted(run.collected):
        outcome = run.outcomes.get(case, "not run")
        if outcome != "passed":
            said.append(f"{case}: {outcome}")
    if run.exit_status and not said:
        said.append(f"pytest exited with {run.exit_status}")
    return tuple(said)


def shrunken(now: Cases, before: Cases, retired: str) -> tuple[str, ...]:
    """Each function with fewer cases than `before` had that `retired` (`NAME: reason`) does not excuse."""
    excused = set()
    for line in retired.splitlines():
        name, _, reason = line.partition(": ")
        if len(reason.strip()) >= 10:
            excused.add(name)
    return tuple(
        f"{name} had {count} cases and has {now.get(name, 0)}; say why in {DIRECTORY}/{RETIRED}"
        for name, count in sorted(before.items())
        if now.get(name, 0) < count and name not in excused
    )


def released(suite: str, root: Path = ROOT) -> Cases:
    """The list as the newest release tag before this commit has it; without a release, as first committed."""
    name = f"{DIRECTORY}/{suite}.txt"
    tag = capture(["git", "describe", "--tags", "--abbrev=0", "--match", "v*"], cwd=root, check=False)
    base = tag.stdout.strip() if tag.returncode == 0 else ""
    if not base:
        added = capture(["git", "log", "--diff-filter=A", "--format=%H", "--", name], cwd=root).stdout.split()
        base = added[-1] if added else ""
    if not base:
        return {}
    shown = capture(["git", "show", f"{base}:{name}"], cwd=root, check=False)
    return parse(shown.stdout) if shown.returncode == 0 else {}


def check_list(suite: str, root: Path = ROOT) -> tuple[str, ...]:
    """What is wrong with a suite's list itself: missing, empty, or shorter than it was without a reason."""
    cases = listed(suite, root)
    if not cases:
        return (f"{DIRECTORY}/{suite}.txt names no case: `nox -s cases` writes it",)
    path = root / DIRECTORY / RETIRED
    retired = path.read_text(encoding="utf-8") if path.is_file() else ""
    return shrunken(cases, released(suite, root), retired)


def collect(suite: str, root: Path = ROOT) -> Cases:
    """The cases that pytest collects now, in its own words. Starts pytest, runs no case."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "cases.json"
        options = {"PYTEST_ADDOPTS": "-p qualify.collected", "AFD_GATE_CASES": str(target)}
        capture([*words, *SUITES[suite]], cwd=root, env=clean_environment() | options, timeout_s=600)
        return by_function(msgspec.json.decode(target.read_bytes(), type=Run).collected)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the lists anew from what pytest collects; print what came and what went."""
    parser = argparse.ArgumentParser(prog="python -m qualify.expected", description=main.__doc__)
    parser.add_argument("suites", nargs="*", default=[*SUITES], metavar="SUITE", help=", ".join(SUITES))
    (ROOT / DIRECTORY).mkdir(exist_ok=True)
    for suite in parser.parse_args(arguments).suites:
        before, now = listed(suite), collect(suite)
        (ROOT / DIRECTORY / f"{suite}.txt").write_text(render(now), encoding="utf-8")
        print(f"{suite}: {sum(now.values())} cases of {len(now)} functions")
        for name in sorted(set(before) | set(now)):
            if before.get(name, 0) != now.get(name, 0):
                print(f"  {name}: {before.get(name, 0)} -> {now.get(name, 0)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
