# SPDX-License-Identifier: Apache-2.0
"""`nox -s accuracy -- --cell h200x1`: the accuracy gate on a GPU host, for the ledger.

As on the CPU it starts only where the end-to-end gate of the same revision, cell, lock and environment is on record as
PASS, and what is limited is a diagnosis with another exit status. What is measured is :mod:`qualify.gpu.accuracy`'s.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from afd_plugin.supervisor.signals import leave_by_exit
from qualify import ledger
from qualify.accuracy.checkpoints import CheckpointAltered
from qualify.accuracy.gate import DIAGNOSTIC, OUTPUT, NotYet, require_e2e, write_accounts
from qualify.cells import CellError, load
from qualify.gpu import accuracy, mps
from qualify.gpu.cell import CELLS, refusal
from qualify.gpu.host import Host

BUDGET_S = 1500.0


def metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a run that go into its record: every side's score, every comparison's counts and p-value."""
    scores = {
        f"{name}_{key}": side[key]
        for name, side in result["sides"].items()
        for key in ("scored", "right")
        if "error" not in side
    }
    return {**scores, **result["metrics"]}


def digests(result: Mapping[str, Any], account: Path) -> dict[str, str]:
    """SHA-256 of what was asked, of what lm-eval returned for each side, and of the account of the whole run."""
    found = {f"{name}_questions": value for name, value in result["questions"].items()}
    for name, side in result["sides"].items():
        if "error" not in side:
            found |= {f"{name}_{key}": side[f"{key}_sha256"] for key in ("results", "samples")}
    return {**found, "account": hashlib.sha256(account.read_bytes()).hexdigest()}


def shown(result: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each comparison."""
    return tuple(
        f"{name} against native: {one['rows']} rows, native {one['native']:.3f}, AFD {one['afd']:.3f}, "
        f"lost {one['lost']}, won {one['won']}, p = {one['p_value']:.3g}, "
        f"{sum(one['differing'].values())} answers differ; smallest drop seen with 95% power: "
        f"{100 * one['smallest_visible_drop']:.2f} points"
        for name, one in result["comparisons"].items()
    )


def main(words: Sequence[str]) -> int:
    """0 when every comparison passed, 1 when not, 2 when nothing was measured, 3 for a diagnosis."""
    parser = argparse.ArgumentParser(prog="nox -s accuracy --", description=__doc__)
    parser.add_argument("--cell", choices=[*CELLS], required=True)
    parser.add_argument("--diagnostic", action="store_true", help="measure without the end-to-end gate")
    parser.add_argument("--rows", type=int, help="only the first rows of each task; implies --diagnostic")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds; what is not over then is missing"
    )
    parser.add_argument("--evidence", type=Path, default=ledger.DIRECTORY, help="another ledger directory")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the account and all logs are kept here")
    chosen = parser.parse_args(words)
    cell = CELLS[chosen.cell]
    if reason := refusal(cell):
        print(f"accuracy: {reason}", file=sys.stderr)
        return 2
    folder = chosen.output / time.strftime("%Y%m%d-%H%M%S")
    settings = {} if chosen.rows is None else {"rows": chosen.rows}
    diagnostic = chosen.diagnostic or bool(settings)
    try:
        if not diagnostic:
            require_e2e(load(cell.name), chosen.evidence)
        folder.mkdir(parents=True)
        with mps.daemon():
            result = accuracy.accuracy(Host(folder, time.monotonic() + chosen.budget, settings, cell.devices))
    except (CellError, NotYet, CheckpointAltered) as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    account = folder / "accuracy.json"
    account.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_accounts(metrics(result), digests(result, account))
    print(*shown(result), f"the whole account: {account}", sep="\n")
    if diagnostic:
        print("DIAGNOSTIC, not evidence: " + ("; ".join(result["faults"]) or "no fault seen"))
        return DIAGNOSTIC
    print("accuracy: " + ("PASS" if result["passed"] else "FAIL\n  " + "\n  ".join(result["faults"])))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    leave_by_exit()
    sys.exit(main(sys.argv[1:]))
