# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m qualify.gpu PART... --out FOLDER`, or `--plan NAME` for one whole command on a lease.

A part that ends with `passed: false`, or by an exception, or was not run, makes the exit status 1; a host that is not
the cell makes it 2. Each part writes `PART.json` as soon as it is over.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from afd_plugin.supervisor.signals import leave_by_exit
from qualify.gpu import accuracy, clients, faults, mps, parity, parts, probe, speed, timeline
from qualify.gpu.cell import CELLS, refusal
from qualify.gpu.host import Host
from qualify.gpu.plans import PLANS, Stage
from qualify.process import CommandError

PARTS: Mapping[str, Callable[[Host], Any]] = {
    "control": parts.control,
    "contract": parts.contract,
    "links": parts.links,
    "exchange": parts.exchange,
    "parity": parity.parity,
    "bench": speed.bench,
    "timeline": timeline.timeline,
    "faults": faults.faults,
    "endurance": faults.endurance,
    "clients": clients.clients,
    "serving": clients.serving,
    "accuracy": accuracy.accuracy,
}


@dataclass(frozen=True)
class Recorder:
    """Runs parts and writes what came of them."""

    out: Path
    facts: Mapping[str, Any]
    bodies: Mapping[str, Callable[[Host], Any]]

    def stage(self, stage: Stage, host: Host) -> bool:
        """Run the parts of a stage side by side; whether all of them passed."""
        beside = {"beside": True} if len(stage.parts) > 1 else {}
        host = replace(host, settings={**beside, **stage.settings, **host.settings})
        # what should take longer than is left may still fit; what is hopeless is not begun
        if host.left() < min(stage.seconds, 60.0):
            for name in stage.parts:
                reason = f"not run: {host.left():.0f} s of the budget were left; about {stage.seconds:g} are needed"
                self._write(name, {"error": reason}, host.settings, 0.0)
            return False
        with ThreadPoolExecutor(len(stage.parts)) as pool:
            return all(list(pool.map(lambda name: self._part(name, host), stage.parts)))

    def _part(self, name: str, host: Host) -> bool:
        started = time.monotonic()
        try:
            outcome = {"result": self.bodies[name](host)}
        except Exception as error:  # noqa: BLE001 - the part's outcome, written down and shown
            outcome = {"error": f"{type(error).__name__}: {error}"[-6000:]}
            traceback.print_exc()
        self._write(name, outcome, host.settings, time.monotonic() - started)
        result = outcome.get("result")
        return "error" not in outcome and not (isinstance(result, dict) and result.get("passed") is False)

    def _write(
        self, name: str, outcome: Mapping[str, Any], settings: Mapping[str, Any], seconds: float
    ) -> None:
        asked = [
            word for key, value in settings.items() for word in ("--option", f"{key}={json.dumps(value)}")
        ]
        evidence = {
            "part": name,
            "host": self.facts,
            "command": ["python", "-m", "qualify.gpu", name, "--out", "FOLDER", *asked],
            **outcome,
            "seconds": round(seconds, 1),
        }
        path = self.out / f"{name}.json"
        path.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
        print(f"gpu: {name} took {evidence['seconds']} s, see {path}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python -m qualify.gpu", description=__doc__)
    options.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    options.add_argument("--plan", choices=[*PLANS], help="stages, settings and cell of one command")
    options.add_argument("--cell", choices=[*CELLS], help="what this host must be (default h200x1)")
    options.add_argument("--out", type=Path, required=True, help="folder for the evidence")
    options.add_argument("--logs", type=Path, help="folder for the logs of all engines")
    options.add_argument("--no-mps", action="store_true", help="do not start the MPS daemon")
    options.add_argument(
        "--budget", type=float, default=540, help="seconds; no stage is begun that cannot be over by then"
    )
    options.add_argument(
        "--option", action="append", default=[], metavar="NAME=JSON", help="settings of a part"
    )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = parser().parse_args(arguments)
    plan = PLANS[options.plan] if options.plan else None
    stages = plan.stages if plan else tuple(Stage((name,), 0) for name in options.parts)
    cell = CELLS[options.cell or (plan.cell if plan else "h200x1")]
    reason = refusal(cell) if stages else "name a part or a --plan"
    if reason is not None:
        print(f"gpu: {reason}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="afd-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    settings = {
        name: json.loads(value) for name, _, value in (text.partition("=") for text in options.option)
    }
    with ExitStack() as stack:
        with_mps = False if options.no_mps else stack.enter_context(mps.daemon())
        try:
            facts = {**probe.ask("facts"), "mps": with_mps}
        except CommandError as error:
            print(f"gpu: this host is not the cell {cell.name}: {error}", file=sys.stderr)
            return 2
        host = Host(logs, time.monotonic() + options.budget, settings, cell.devices)
        recorder = Recorder(options.out, facts, PARTS)
        passed = [recorder.stage(stage, host) for stage in stages]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    leave_by_exit()
    sys.exit(main())
