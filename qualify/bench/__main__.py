# SPDX-License-Identifier: Apache-2.0
"""`python -m qualify.bench cpu [MODEL]`: measure, print, write `out/bench-cpu.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from afd_plugin.supervisor.signals import leave_by_exit
from qualify.bench import cpu

OUTPUT = Path("out")


def main(arguments: list[str]) -> int:
    """Run the bench that `arguments` name; exit code 0 when it was measured, whatever the figures are."""
    lane, *rest = arguments or ["cpu"]
    if lane != "cpu":
        sys.stderr.write(f"bench: there is no lane {lane!r} here; known: cpu\n")
        return 2
    results = [cpu.run(name) for name in rest or ["deepseek-v2"]]
    OUTPUT.mkdir(exist_ok=True)
    report = OUTPUT / "bench-cpu.json"
    report.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for result in results:
        show(result, Console())
    print(f"Report: {report}")
    return 0


def show(result: dict[str, Any], console: Console) -> None:
    """Print one checkpoint's costs."""
    table = Table(
        title=f"{result['model']}: {result['repeats']} repeats of {result['tokens']} tokens, interleaved"
    )
    for heading in (
        "service",
        "step ms (low-high)",
        "over native",
        "growth/exchange ms",
        "beyond compute ms (p90, mean)",
    ):
        table.add_column(heading, justify="right")
    for name, entry in result["services"].items():
        step, beyond = entry["step_ms"], entry["beyond_compute_per_exchange_ms"]
        table.add_row(
            name,
            f"{step['median']:.2f} ({step['low']:.2f}-{step['high']:.2f})",
            *(
                "" if entry[key] is None else f"{entry[key]:.3f}"
                for key in ("step_over_native", "growth_per_exchange_ms")
            ),
            "" if beyond is None else f"{beyond['median']:.3f} ({beyond['p90']:.3f}, {beyond['mean']:.3f})",
        )
    console.print(table)
    console.print(
        f"Aim: at most {result['limit_ms']} ms per exchange beyond the FFN's own compute, on a quiet machine."
    )


if __name__ == "__main__":
    leave_by_exit()
    sys.exit(main(sys.argv[1:]))
