# SPDX-License-Identifier: Apache-2.0
"""The demo's result: one line per checkpoint, its verdict, `demo-report.json` and the printed table."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from afd_plugin.demo.parity import Parity

BYTES_TOLERANCE = 0.01
"""How far the sum over the roles may be from what one native process holds (the final norm is on both)."""


@dataclass(frozen=True)
class Outcome:
    """What the demo found for one checkpoint. Bytes are of weights as loaded; times in ms per decode step."""

    parity: Parity
    native_bytes: int
    attention_bytes: int
    ffn_bytes: int
    attention_expert_bytes: int
    native_ms_per_step: float
    afd_ms_per_step: float
    exchanges_per_step: float
    note: str = ""

    def faults(self) -> list[str]:
        """What is not as promised, in sentences; empty when all is well."""
        parity, found = self.parity, []
        if parity.equal_token_lists != parity.requests:
            found.append(f"{parity.requests - parity.equal_token_lists} of {parity.requests} answers differ")
        if parity.bitwise_equal != parity.logprob_entries:
            different = parity.logprob_entries - parity.bitwise_equal
            found.append(
                f"{different} of {parity.logprob_entries} log-probabilities differ, by up to "
                f"{parity.max_abs_dlogprob:.3g}"
            )
        if self.attention_expert_bytes:
            found.append(
                f"attention holds {self.attention_expert_bytes} bytes of expert weights, expected none"
            )
        held = self.attention_bytes + self.ffn_bytes
        if abs(held - self.native_bytes) > BYTES_TOLERANCE * self.native_bytes:
            found.append(f"the roles hold {held} bytes together, a native process {self.native_bytes}")
        if self.exchanges_per_step <= 0:
            found.append("no exchange between the roles was counted")
        return found

    def content(self) -> dict[str, Any]:
        """The checkpoint's entry in `demo-report.json`."""
        content: dict[str, Any] = {
            "requests": self.parity.requests,
            "equal_token_lists": self.parity.equal_token_lists,
            "logprob_entries": self.parity.logprob_entries,
            "bitwise_equal": self.parity.bitwise_equal,
            "max_abs_dlogprob": self.parity.max_abs_dlogprob,
            "native_bytes": self.native_bytes,
            "attention_bytes": self.attention_bytes,
            "ffn_bytes": self.ffn_bytes,
            "attention_expert_bytes": self.attention_expert_bytes,
            "ms_per_step": {"native": self.native_ms_per_step, "afd": self.afd_ms_per_step},
            "exchanges_per_step": self.exchanges_per_step,
        }
        return {**content, "note": self.note} if self.note else content


def write_report(outcomes: Mapping[str, Outcome], details: Mapping[str, Any], path: Path) -> None:
    """Write `demo-report.json`: the checkpoints' entries, and beside them what describes the run."""
    content = {
        "checkpoints": {name: outcome.content() for name, outcome in outcomes.items()},
        "faults": {name: outcome.faults() for name, outcome in outcomes.items()},
        **details,
    }
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


_ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("answers equal to native", lambda o: f"{o.parity.equal_token_lists} of {o.parity.requests}"),
    ("log-probabilities, same bits", lambda o: f"{o.parity.bitwise_equal} of {o.parity.logprob_entries}"),
    ("largest difference", lambda o: f"{o.parity.max_abs_dlogprob:g}"),
    ("weights: native, MiB", lambda o: _mib(o.native_bytes)),
    ("    held by attention", lambda o: _mib(o.attention_bytes)),
    ("    held by FFN", lambda o: _mib(o.ffn_bytes)),
    ("expert bytes on attention", lambda o: str(o.attention_expert_bytes)),
    ("decode step: native, ms", lambda o: f"{o.native_ms_per_step:.2f}"),
    ("    AFD, ms", lambda o: f"{o.afd_ms_per_step:.2f}"),
    ("exchanges per step", lambda o: f"{o.exchanges_per_step:g}"),
    ("verdict", lambda o: "[red]DIFFERS[/red]" if o.faults() else "[green]equal[/green]"),
)
"""The table's lines: what a newcomer reads, and where it comes from. It fits 80 columns."""


def print_report(outcomes: Mapping[str, Outcome], console: Console) -> None:
    """Print the table, what it means, and the verdict."""
    table = Table(title="One model, two services: answers unchanged?")
    table.add_column("")
    for name in outcomes:
        table.add_column(name, justify="right")
    for label, value in _ROWS:
        table.add_row(label, *(value(outcome) for outcome in outcomes.values()))
    console.print(table)
    console.print(
        "Each checkpoint was served twice: by vLLM alone (native) and by AFD as one attention and one FFN "
        "process. Both got the same requests, one at a time. An answer is equal when every token is; a "
        "log-probability when every bit is. An exchange sends one MoE layer's tokens to the experts and "
        "back; models this small mostly show its cost.",
        highlight=False,
    )
    notes = {outcome.note for outcome in outcomes.values() if outcome.note}
    for note in sorted(notes):
        names = ", ".join(name for name, outcome in outcomes.items() if outcome.note == note)
        console.print(f"[dim]{names}: {note}.[/dim]", highlight=False)
    for name, outcome in outcomes.items():
        for fault in outcome.faults():
            console.print(f"[red]{name}: {fault}.[/red]", highlight=False)
    if not any(outcome.faults() for outcome in outcomes.values()):
        console.print("[green]Native vLLM and AFD agree to the last bit.[/green]")


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"
