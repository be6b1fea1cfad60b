# SPDX-License-Identifier: Apache-2.0
"""`python -m qualify`: what runs (`identity`), is the evidence sound (`verify`, `report`), how far is the workflow
(`phases`), stay or upgrade (`align`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from qualify import identity, ledger, progress, report, revision, verify
from qualify.cells import ROOT, Cell, CellError, load
from qualify.chain import Profile
from qualify.process import CommandError
from qualify.upgrade import __main__ as upgrade


def show_identity(chosen: argparse.Namespace) -> int:
    """Print the effective tuple and each way in which it is not the cell; exit 1 when there is one."""
    seen = identity.observe()
    print(msgspec.json.format(msgspec.json.encode(seen), indent=1).decode())
    faults = identity.reconcile(load(chosen.cell), seen)
    print(*(f"BLOCKED {line}" for line in faults), f"environment {seen.digest()}", sep="\n")
    return 1 if faults else 0


def _latest(
    cell: Cell, profile: Profile, evidence: Path
) -> tuple[identity.Binding, tuple[ledger.Record, ...]]:
    """What the last chain of this profile at this revision and lock is bound to, and the whole ledger."""
    now = revision.revision(ROOT)
    lock = cell.lock_digest() if cell.locks else identity.UNKNOWN
    records = ledger.read(cell.name, evidence)
    bound = verify.latest(records, cell.name, lock, now, profile)
    return bound or identity.Binding(cell.name, lock, now, "none"), records


def run_verify(chosen: argparse.Namespace) -> int:
    """Judge the ledger of a cell at this revision; exit 1 unless it is sound and the chain whole.

    Without `--head` nothing outside the ledger vouches for it but git's history; the verdict says so.
    """
    cell, profile = load(chosen.cell), Profile(chosen.profile)
    binding, _ = _latest(cell, profile, chosen.evidence)
    verdict = verify.verify(cell, binding, profile, head=chosen.head, directory=chosen.evidence)
    print(
        *(f"fault: {line}" for line in verdict.faults),
        *(f"missing: {line}" for line in verdict.missing),
        sep="\n",
    )
    vouched = "attested head" if chosen.head else "no head was given: vouched for by git's history alone"
    word = "whole" if verdict.whole else "NOT whole"
    print(
        f"{cell.name} {profile.value} at revision {binding.revision[:12]}: {word}; head {verdict.head} ({vouched})"
    )
    return 0 if verdict.whole else 1


def show_phases(chosen: argparse.Namespace) -> int:
    """Print the phases of a cell's chain at this revision; exit 1 when one of them did not pass."""
    cell, profile = load(chosen.cell), Profile(chosen.profile)
    binding, records = _latest(cell, profile, chosen.evidence)
    state = progress.workflow(cell, profile, binding, records, ROOT / progress.PLAN, chosen.evidence)
    print(progress.shown(cell, profile, state), end="")
    return 1 if state.stopped_by is not None else 0


def write_report(chosen: argparse.Namespace) -> int:
    """Write the report; Markdown or HTML by the name of the file, to the terminal as Markdown without one."""
    evidence = report.Evidence(directory=chosen.evidence)
    if chosen.output is None:
        print(report.markdown(evidence), end="")
        return 0
    text = report.html(evidence) if chosen.output.suffix == ".html" else report.markdown(evidence)
    chosen.output.write_text(text, encoding="utf-8")
    return 0


def write_schema(chosen: argparse.Namespace) -> int:
    """Write the JSON schema of a ledger line beside the ledgers."""
    chosen.evidence.mkdir(exist_ok=True)
    (chosen.evidence / ledger.SCHEMA_FILE).write_bytes(ledger.schema())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 2 for a request that makes no sense here."""
    parser = argparse.ArgumentParser(prog="python -m qualify", description=__doc__)
    parser.add_argument("--evidence", type=Path, default=ledger.DIRECTORY, help="another ledger directory")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("identity", help=show_identity.__doc__)
    one.add_argument("cell")
    one.set_defaults(run=show_identity)
    two = commands.add_parser("verify", help=run_verify.__doc__)
    two.add_argument("--cell", default="cpu")
    two.add_argument("--profile", choices=[p.value for p in Profile], default=Profile.QUALIFYING.value)
    two.add_argument("--head", help="the head hash that the tag or the attestation carries")
    two.set_defaults(run=run_verify)
    five = commands.add_parser("phases", help=show_phases.__doc__)
    five.add_argument("--cell", default="cpu")
    five.add_argument("--profile", choices=[p.value for p in Profile], default=Profile.QUALIFYING.value)
    five.set_defaults(run=show_phases)
    three = commands.add_parser("report", help=write_report.__doc__)
    three.add_argument("output", type=Path, nargs="?", help="a .md or .html file")
    three.set_defaults(run=write_report)
    four = commands.add_parser("schema", help=write_schema.__doc__)
    four.set_defaults(run=write_schema)
    upgrade.add_align(commands)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except (CellError, CommandError, ledger.LedgerError, *upgrade.FAILURES) as error:
        print(f"qualify: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
