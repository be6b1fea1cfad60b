# SPDX-License-Identifier: Apache-2.0
"""The last session of a chain: is everything that was claimed on record, for exactly what lies here?

`python -m qualify.final_audit --cell cpu [--profile landing]` demands a PASS of every session and every shard
before it, for this revision, cell, lock and environment, a clean tree, consistent versions and whole lists of
cases. It tells CPU evidence and GPU evidence apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from qualify import expected, identity, ledger, revision, verify
from qualify.cells import ROOT, Cell, CellError, load
from qualify.chain import Part, Profile, parts
from qualify.identity import Binding
from qualify.lint import text
from qualify.lint.__main__ import tracked
from qualify.package import mirrored, project_version
from qualify.process import CommandError

OWN = "final_audit"


def chain_complaints(
    cell: Cell, binding: Binding, profile: Profile, directory: Path = ledger.DIRECTORY
) -> tuple[str, ...]:
    """What the ledger lacks of everything before this session, and every sign that it is not sound."""
    verdict = verify.verify(cell, binding, profile, directory=directory)
    return (*verdict.faults, *(line for line in verdict.missing if not line.startswith(f"{OWN}: ")))


def tree_complaints(cell: Cell, chain: Sequence[Part]) -> tuple[str, ...]:
    """What is wrong with the tree itself: changes, versions that disagree, lists of cases that shrank."""
    pages = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in tracked(ROOT)
        if name in {place for place, _ in text.VERSION_PLACES}
    }
    said = [f"dirty tree: {path}" for path in revision.dirty(ROOT)]
    said += [str(finding) for finding in text.versions(pages)]
    if not mirrored(version := project_version(ROOT), cell.vllm):
        said.append(f"version {version} does not mirror vLLM {cell.vllm}")
    return (*said, *(line for part in chain if part.suite for line in expected.check_list(part.suite)))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything is there, 1 when not, 2 for a request that makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m qualify.final_audit", description=__doc__)
    parser.add_argument("--cell", default="cpu")
    parser.add_argument("--profile", choices=[p.value for p in Profile], default=Profile.QUALIFYING.value)
    parser.add_argument("--evidence", type=Path, default=ledger.DIRECTORY, help="another ledger directory")
    chosen = parser.parse_args(arguments)
    profile = Profile(chosen.profile)
    try:
        cell = load(chosen.cell)
        seen = identity.observe()
        binding = identity.bind(cell, seen)
        faults = [*identity.reconcile(cell, seen), *tree_complaints(cell, parts(cell, profile))]
        faults += chain_complaints(cell, binding, profile, chosen.evidence)
        entries = verify.of(ledger.read(cell.name, chosen.evidence), binding, profile)
    except (CellError, CommandError, ledger.LedgerError) as error:
        print(f"final audit: {error}", file=sys.stderr)
        return 2
    kind = "GPU" if cell.devices else "CPU-safe"
    print(f"{kind} evidence on {cell.name}, revision {binding.revision[:12]}:")
    for entry in entries:
        counts = f", {entry.counts.passed}/{entry.counts.collected} cases" if entry.counts else ""
        print(f"  {entry.session} {entry.shard} {entry.status.value}{counts}, {entry.seconds:.0f} s")
    print(
        "what no record of this cell can show: "
        + ("other devices" if cell.devices else "anything about a GPU")
    )
    print(*(f"final audit: {line}" for line in faults), sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
