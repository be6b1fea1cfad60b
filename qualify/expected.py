# SPDX-License-Identifier: Apache-2.0
"""Which test cases a session must run: one tracked list per suite, and what is wrong with a run against it.

A case that is missing, skipped, expected to fail or not listed is a fault. A list may shrink only for a reason:
a case that an earlier release or record ran and the list no longer names must stand in `retired.txt` with a
word on why.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from qualify.ledger import Counts
from qualify.process import capture, clean_environment

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = "qualify/cases"
SUITES = {"unit": "tests/unit", "e2e": "tests/e2e", "gpu_e2e": "tests/gpu_e2e"}
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


def shard_of(case: str, shards: int) -> int:
    """Which of `shards` a case belongs to (from 1): by its file, so that module fixtures stay together."""
    name = case.partition("::")[0]
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % shards + 1


def of_shard(cases: Iterable[str], shard: str) -> tuple[str, ...]:
    """The cases of one shard, `2/3`; all of them for an empty name."""
    if not shard:
        return tuple(cases)
    number, _, shards = shard.partition("/")
    return tuple(case for case in cases if shard_of(case, int(shards)) == int(number))


def digest(cases: Iterable[str]) -> str:
    """One SHA-256 of a list of cases, whatever its order."""
    return hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()


def listed(suite: str, root: Path = ROOT) -> tuple[str, ...]:
    """The cases that a suite must run; empty when the suite has no list."""
    path = root / DIRECTORY / f"{suite}.txt"
    return tuple(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()


def complaints(run: Run, expected: Sequence[str]) -> tuple[str, ...]:
    """One sentence for each way in which a run is not all of `expected`, passed."""
    seen, want = set(run.collected), set(expected)
    said = [f"{name} could not be collected" for name in run.broken]
    said += [f"{case} is expected and was not collected" for case in sorted(want - seen)]
    said += [f"{case} is not in the list (`python -m qualify.expected`)" for case in sorted(seen - want)]
    for case in sorted(seen):
        outcome = run.outcomes.get(case, "not run")
        if outcome != "passed":
            said.append(f"{case}: {outcome}")
    if run.exit_status and not said:
        said.append(f"pytest exited with {run.exit_status}")
    return tuple(said)


def shrunken(now: Iterable[str], before: Iterable[str], retired: str) -> tuple[str, ...]:
    """Each case of `before` that `now` no longer names and that `retired` (lines `CASE: reason`) does not excuse."""
    excused = set()
    for line in retired.splitlines():
        case, _, reason = line.rpartition(": ")
        if case and len(reason.strip()) >= 10:
            excused.add(case)
    return tuple(
        f"{case} is gone from the list; say why in {DIRECTORY}/{RETIRED}"
        for case in sorted(set(before) - set(now) - excused)
    )


def released(suite: str, root: Path = ROOT) -> tuple[str, tuple[str, ...]]:
    """The list as the newest release tag before this commit has it, and the tag; without one, as first committed."""
    name = f"{DIRECTORY}/{suite}.txt"
    tag = capture(["git", "describe", "--tags", "--abbrev=0", "--match", "v*"], cwd=root, check=False)
    base = tag.stdout.strip() if tag.returncode == 0 else ""
    if not base:
        added = capture(["git", "log", "--diff-filter=A", "--format=%H", "--", name], cwd=root).stdout.split()
        base = added[-1] if added else ""
    if not base:
        return "", ()
    shown = capture(["git", "show", f"{base}:{name}"], cwd=root, check=False)
    return base, tuple(shown.stdout.splitlines()) if shown.returncode == 0 else ()


def check_list(suite: str, root: Path = ROOT) -> tuple[str, ...]:
    """What is wrong with a suite's list itself: missing, empty, or shorter than it was without a reason."""
    cases = listed(suite, root)
    if not cases:
        return (f"{DIRECTORY}/{suite}.txt names no case: `python -m qualify.expected` writes it",)
    path = root / DIRECTORY / RETIRED
    retired = path.read_text(encoding="utf-8") if path.is_file() else ""
    return shrunken(cases, released(suite, root)[1], retired)


def collect(suite: str, root: Path = ROOT) -> tuple[str, ...]:
    """The cases that pytest collects now, in its own words. Starts pytest, runs no case."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", "-p", "no:cacheprovider"]
    done = capture([*words, SUITES[suite]], cwd=root, env=clean_environment(), timeout_s=300)
    return tuple(sorted(line for line in done.stdout.splitlines() if "::" in line))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the lists anew from what pytest collects; print what came and what went."""
    parser = argparse.ArgumentParser(prog="python -m qualify.expected", description=main.__doc__)
    parser.add_argument("suites", nargs="*", default=["unit", "e2e"], metavar="SUITE", help=", ".join(SUITES))
    (ROOT / DIRECTORY).mkdir(exist_ok=True)
    for suite in parser.parse_args(arguments).suites:
        before, now = set(listed(suite)), collect(suite)
        (ROOT / DIRECTORY / f"{suite}.txt").write_text("".join(f"{case}\n" for case in now), encoding="utf-8")
        print(f"{suite}: {len(now)} cases")
        print(*(f"  new: {case}" for case in sorted(set(now) - before)), sep="\n")
        print(*(f"  gone: {case}" for case in sorted(before - set(now))), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
