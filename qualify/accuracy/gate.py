# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate: both trained models, native against each AFD layout, on the same rows in the same run.

`nox -s accuracy` runs it. It starts only where the end-to-end gate of the same revision, cell, lock and environment
is on record as PASS. With `--diagnostic` it runs anywhere, with `--rows` on fewer rows, and then its exit status is
never 0: a limited run cannot enter the gate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.service import ServiceError
from qualify import identity, ledger, verify
from qualify.accuracy import checkpoints, data, harness, scoring, sides
from qualify.accuracy.architectures import ARCHITECTURES
from qualify.accuracy.checkpoints import CheckpointAltered
from qualify.accuracy.harness import HarnessFailed, Spec
from qualify.accuracy.scoring import Side, Unscorable
from qualify.accuracy.sides import Layout, Place
from qualify.accuracy.statistics import smallest_visible_share
from qualify.accuracy.verdict import Comparison
from qualify.cells import ROOT, Cell, CellError, load
from qualify.chain import Profile, parts
from qualify.execution import DIGESTS, METRICS
from qualify.ledger import Entry
from qualify.phases import Phase, Status

OUTPUT = ROOT / "out" / "accuracy"
SIDE_TIMEOUT_S = 900.0
AFD_LAYOUTS = (Layout.ONE_ONE, Layout.TWO_ONE)
DIAGNOSTIC = 3
"""Exit status of a run that says something and proves nothing."""


class NotYet(RuntimeError):
    """The end-to-end gate has not passed for exactly what would be measured here."""


def e2e_passed(entries: Mapping[Profile, Sequence[Entry]], cell: Cell) -> bool:
    """Whether one profile's chain has a PASS, not followed by a failure, for each of its end-to-end parts."""
    for profile, records in entries.items():
        last = {entry.key: entry.status for entry in records}
        wanted = [part.key for part in parts(cell, profile) if part.phase is Phase.BASIC_E2E_GATE]
        if wanted and all(last.get(key) is Status.PASS for key in wanted):
            return True
    return False


def require_e2e(cell: Cell, directory: Path) -> None:
    """NotYet unless the ledger has the end-to-end gate of this revision, cell, lock and environment."""
    binding = identity.bind(cell, identity.observe())
    records = ledger.read(cell.name, directory)
    if not e2e_passed({profile: verify.of(records, binding, profile) for profile in Profile}, cell):
        raise NotYet(
            f"the ledger has no PASS of the end-to-end gate on {cell.name} at revision {binding.revision[:12]}: "
            "`nox -s gate` runs it first; `--diagnostic` measures without it and proves nothing"
        )


@dataclass(frozen=True)
class Measurement:
    """All that one model gave: native's answers and each layout's comparison."""

    native: Side
    comparisons: Mapping[Layout, Comparison]
    digests: Mapping[str, str]


def answers(
    layout: Layout,
    model: Path,
    rows: Mapping[str, int],
    folder: Path,
    questions: Path,
    *,
    engine: EngineArguments = sides.ENGINE,
    place: Place | None = None,
    timeout_s: float = SIDE_TIMEOUT_S,
) -> tuple[Side, float]:
    """One side's judged answers and the seconds they took. Serves the model, asks, stops."""
    with sides.serving(layout, model, folder / "service", engine, place) as service:
        started = time.monotonic()
        spec = Spec(
            sides.completions_url(service),
            sides.MODEL_NAME,
            str(model),
            tuple(rows),
            engine.max_model_len,
            str(folder / "lm-eval.json"),
        )
        path = harness.run(spec, questions, folder / "lm-eval", timeout_s)
        seconds = time.monotonic() - started
    return scoring.read(path, rows), seconds


def measure(name: str, model: Path, layouts: Sequence[Layout], rows: int | None, folder: Path) -> Measurement:
    """Native and each layout on the same rows; prints a line each."""
    questions = folder / "questions"
    questions.mkdir(parents=True)
    requested = data.write(questions, data.MIXES[name], rows)
    found: dict[Layout, Side] = {}
    digests = {f"{name}_questions": data.digest(questions)}
    for layout in (Layout.NATIVE, *layouts):
        found[layout], seconds = answers(layout, model, requested, folder / layout.value, questions)
        side = found[layout]
        digests[f"{name}_{layout.value}_results"] = side.results
        digests[f"{name}_{layout.value}_samples"] = side.samples
        scores = {
            task: f"{sum(row.right for row in answered) / len(answered):.3f}"
            for task, answered in side.rows.items()
        }
        print(
            f"{name} {layout.value}: {sum(side.right)} of {side.scored} right, {side.scored / seconds:.1f} rows/s, "
            f"{json.dumps(scores)}",
            flush=True,
        )
    native = found[Layout.NATIVE]
    comparisons = {layout: Comparison.of(native, found[layout], bitwise=True) for layout in layouts}
    return Measurement(native, comparisons, digests)


def report(name: str, measured: Measurement) -> tuple[str, ...]:
    """Print each comparison; its faults, with the names of model and layout."""
    said: list[str] = []
    for layout, comparison in measured.comparisons.items():
        pooled = comparison.pooled
        print(
            f"{name} {layout.value} against native: lost {pooled.lost}, won {pooled.won}, p = {pooled.p_value:.3g}, "
            f"{sum(comparison.differing.values())} answers differ; smallest drop seen with 95% power: "
            f"{100 * comparison.visible_drop:.2f} points (McNemar), "
            f"{100 * smallest_visible_share(pooled.rows):.2f}% of the rows (equality)",
            flush=True,
        )
        said += [f"{name} {layout.value}: {fault}" for fault in comparison.faults()]
    return tuple(said)


def write_accounts(metrics: Mapping[str, float], digests: Mapping[str, str]) -> None:
    """Hand metrics and digests to the gate, where it asked for them."""
    for variable, content in ((METRICS, metrics), (DIGESTS, digests)):
        if target := os.environ.get(variable):
            Path(target).write_text(json.dumps(dict(content)), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every comparison passed, 1 when not, 2 when nothing was measured, 3 for a diagnosis."""
    parser = argparse.ArgumentParser(prog="python -m qualify.accuracy", description=__doc__)
    parser.add_argument("--cell", default="cpu")
    parser.add_argument("--diagnostic", action="store_true", help="measure without the end-to-end gate")
    parser.add_argument("--rows", type=int, help="only the first rows of each task; implies --diagnostic")
    parser.add_argument("--model", action="append", choices=sorted(ARCHITECTURES), help="default: all")
    parser.add_argument("--layout", action="append", choices=[layout.value for layout in AFD_LAYOUTS])
    parser.add_argument("--evidence", type=Path, default=ledger.DIRECTORY, help="another ledger directory")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="what lm-eval returned is kept here")
    chosen = parser.parse_args(arguments)
    limited = chosen.rows is not None or chosen.model is not None or chosen.layout is not None
    diagnostic = chosen.diagnostic or limited
    layouts = [Layout(value) for value in chosen.layout or [layout.value for layout in AFD_LAYOUTS]]
    folder = chosen.output / time.strftime("%Y%m%d-%H%M%S")
    faults: list[str] = []
    metrics: dict[str, float] = {}
    digests: dict[str, str] = {}
    try:
        cell = load(chosen.cell)
        if cell.devices:
            raise NotYet(f"accuracy on {cell.name} needs its GPU: `nox -s accuracy -- --cell {cell.name}`")
        if not diagnostic:
            require_e2e(cell, chosen.evidence)
        for name in chosen.model or ARCHITECTURES:
            model = checkpoints.checked(ARCHITECTURES[name])
            measured = measure(name, model, layouts, chosen.rows, folder / name)
            faults += report(name, measured)
            digests |= measured.digests
            for layout, comparison in measured.comparisons.items():
                metrics |= comparison.metrics(f"{name}_{layout.value}")
    except (CellError, NotYet, CheckpointAltered) as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    except (ServiceError, HarnessFailed, Unscorable) as error:
        print(f"accuracy is FAIL: {error}", file=sys.stderr)
        return 1
    write_accounts(metrics, digests)
    for label, value in sorted(digests.items()):
        print(f"sha256 {label} {value}")
    if diagnostic:
        print("DIAGNOSTIC, not evidence: " + ("; ".join(faults) or "no fault seen"))
        return DIAGNOSTIC
    print("accuracy: " + ("FAIL\n  " + "\n  ".join(faults) if faults else "PASS"))
    return 1 if faults else 0
