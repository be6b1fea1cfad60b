# SPDX-License-Identifier: Apache-2.0
"""What may be claimed, from the ledgers alone: the support matrix by layer, as rows."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qualify.ledger import Entry, Record
from qualify.phases import Status


class State(str, enum.Enum):
    """How well a claim is founded."""

    VALIDATED = "validated"
    UNIT_ONLY = "unit only"
    UNVALIDATED = "unvalidated"
    UNSUPPORTED = "unsupported"
    HISTORICAL = "historical"


@dataclass(frozen=True)
class Claim:
    """One thing that the project says it does: the layer it belongs to, and the sessions that prove it on a cell.

    With `unit` the unit tests cover the claim's code, so that without its own sessions it is "unit only". A claim
    that is `refused` is what the project refuses by name. Without a cell nothing can validate a claim.
    """

    layer: str
    text: str
    cells: tuple[str, ...]
    sessions: tuple[str, ...]
    unit: bool = False
    refused: bool = False


CLAIMS = (
    Claim("1 logic", "configuration, topology, plan, control plane, supervisor", ("cpu",), ("unit",)),
    Claim(
        "1 logic", "every use of vLLM is a registered seam, none is patched or copied", ("cpu",), ("audit",)
    ),
    Claim("1 logic", "wheel and sdist: reproducible, install with and without vLLM", ("cpu",), ("package",)),
    Claim("1 logic", "extension of `csrc/`: stable ABI only", ("cpu",), ("abi",)),
    Claim("2 CPU runtime", "native vLLM serves the test models", ("cpu",), ("native_control",)),
    Claim(
        "2 CPU runtime",
        "attention + FFN equal native vLLM to the last bit; faults end both",
        ("cpu",),
        ("e2e",),
    ),
    Claim("2 CPU runtime", "accuracy of trained test models", ("cpu",), ("accuracy",)),
    Claim("3 CUDA runtime", "one H200, both roles", ("h200x1",), ("gpu_e2e",)),
    Claim("3 CUDA runtime", "two H200 of one host", ("h200x2",), ("gpu_e2e",)),
    Claim("3 CUDA runtime", "accuracy on the GPU", ("h200x1",), ("accuracy",)),
    Claim("4 hosts", "roles on several hosts", (), ()),
    Claim("all", "what docs/refusals.md names", (), (), refused=True),
)


@dataclass(frozen=True)
class Row:
    """One line of the matrix; `why` names the record, or what is missing."""

    layer: str
    claim: str
    cell: str
    state: State
    why: str


def rows(ledgers: Mapping[str, Sequence[Record]], revisions: Mapping[str, str]) -> tuple[Row, ...]:
    """The matrix; `revisions` maps each cell to the revision that is current, `ledgers` to its sound records."""
    made = []
    for claim in CLAIMS:
        if claim.refused:
            made.append(
                Row(claim.layer, claim.text, "any", State.UNSUPPORTED, "refused by name before serving")
            )
        elif not claim.cells:
            made.append(Row(claim.layer, claim.text, "none", State.UNVALIDATED, "no cell for it exists"))
        for cell in claim.cells:
            state, why = judged(claim, ledgers.get(cell, ()), revisions.get(cell, ""))
            made.append(Row(claim.layer, claim.text, cell, state, why))
    return tuple(made)


def judged(claim: Claim, records: Sequence[Record], revision: str) -> tuple[State, str]:
    """A claim's state on one cell and the reason.

    validated: the last record of each session at this revision is PASS. unit only: its own sessions have not run at
    this revision and the unit tests passed. historical: only another revision has a PASS.
    """
    now = {record.entry.session: record.entry for record in records if record.entry.revision == revision}
    found = [now[name] for name in claim.sessions if name in now]
    if len(found) == len(claim.sessions) and all(entry.status is Status.PASS for entry in found):
        return State.VALIDATED, "; ".join(map(_cited, found))
    if failed := [entry for entry in found if entry.status is not Status.PASS]:
        return State.UNVALIDATED, f"{failed[0].session}: {failed[0].status.value} at this revision"
    if claim.unit and "unit" in now and now["unit"].status is Status.PASS:
        return State.UNIT_ONLY, _cited(now["unit"])
    old = [r.entry for r in records if r.entry.session in claim.sessions and r.entry.status is Status.PASS]
    if old:
        return State.HISTORICAL, f"{_cited(old[-1])} of revision {old[-1].revision[:12]}"
    return State.UNVALIDATED, "no record"


def _cited(entry: Entry) -> str:
    counts = f", {entry.counts.passed} of {entry.counts.collected} cases" if entry.counts else ""
    return f"{entry.session} {entry.status.value} {entry.started[:10]} ({entry.profile}{counts})"


def table(matrix: Sequence[Row]) -> str:
    """The matrix in Markdown."""
    lines = ["| layer | claim | cell | state | evidence |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {row.layer} | {row.claim} | {row.cell} | {row.state.value} | {row.why} |" for row in matrix]
    return "\n".join(lines) + "\n"
