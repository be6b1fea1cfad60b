# SPDX-License-Identifier: Apache-2.0
"""What may be claimed, from the ledgers alone: the support matrix by layer, as rows."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qualify.chain import Profile
from qualify.identity import Binding
from qualify.ledger import Entry, Record
from qualify.phases import Status
from qualify.verify import standing


class State(str, enum.Enum):
    """How well a claim is founded."""

    VALIDATED = "validated"
    LANDING = "landing"
    UNVALIDATED = "unvalidated"
    UNSUPPORTED = "unsupported"
    HISTORICAL = "historical"


@dataclass(frozen=True)
class Claim:
    """One thing that the project says it does: the layer it belongs to, and the sessions that prove it on a cell.

    A claim that is `refused` is what the project refuses by name. Without a cell nothing can validate a claim.
    """

    layer: str
    text: str
    cells: tuple[str, ...]
    sessions: tuple[str, ...]
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


@dataclass(frozen=True)
class Run:
    """A session as one chain has it: the last record of each of its shards, or its one record."""

    entries: tuple[Entry, ...]

    @property
    def shards(self) -> int:
        """How many shards it has, on record or not."""
        return int(self.entries[-1].shard.rpartition("/")[2] or 1)

    @property
    def qualifying(self) -> bool:
        """Whether it is of the profile that supports a release."""
        return self.entries[-1].profile == Profile.QUALIFYING.value

    @property
    def failed(self) -> Entry | None:
        """A shard that is not PASS."""
        return next((entry for entry in self.entries if entry.status is not Status.PASS), None)

    @property
    def whole(self) -> bool:
        """Whether every shard is there and has passed: one of six proves nothing about the other five."""
        return self.failed is None and len(self.entries) == self.shards

    def cited(self) -> str:
        """The run in a few words."""
        last, counts = self.entries[-1], [entry.counts for entry in self.entries if entry.counts]
        passed, collected = sum(one.passed for one in counts), sum(one.collected for one in counts)
        cases = f", {passed} of {collected} cases" if counts else ""
        return f"{last.session} {last.status.value} {last.started[:10]} ({last.profile}{cases})"


def runs(records: Sequence[Record], session: str) -> tuple[Run, ...]:
    """Every run of a session in the order in which they ended: one for each chain that has a record of it."""
    found: dict[tuple[Binding, str], dict[str, Entry]] = {}
    for entry in (record.entry for record in records if record.entry.session == session):
        chain = (entry.binding, entry.profile)
        shards = found.pop(chain, {})
        shards.pop(entry.shard, None)
        found[chain] = {**shards, entry.shard: entry}
    return tuple(Run(tuple(shards.values())) for shards in found.values())


def judged(claim: Claim, records: Sequence[Record], revision: str) -> tuple[State, str]:
    """A claim's state on one cell and the reason.

    validated: each session has a whole qualifying run at this revision; landing: a whole run, but of the diagnostic
    profile. Neither with a failure there: in the last run, or in a qualifying one, where it stands. historical: only
    another revision has a whole run.
    """
    every = {name: runs(records, name) for name in claim.sessions}
    now = {
        name: [run for run in found if run.entries[-1].revision == revision] for name, found in every.items()
    }
    stands = {entry.session: entry for entry in reversed(standing(records, revision))}
    for name in claim.sessions:
        if now[name] and (failed := now[name][-1].failed or stands.get(name)):
            return State.UNVALIDATED, f"{name}: {failed.status.value} at this revision"
    whole = {name: [run for run in now[name] if run.whole] for name in now}
    if claim.sessions and all(whole[name] for name in claim.sessions):
        last = [
            next((run for run in whole[name] if run.qualifying), whole[name][-1]) for name in claim.sessions
        ]
        state = State.VALIDATED if all(run.qualifying for run in last) else State.LANDING
        return state, "; ".join(run.cited() for run in last)
    if old := [run for name in claim.sessions for run in every[name] if run.whole]:
        return State.HISTORICAL, f"{old[-1].cited()} of revision {old[-1].entries[-1].revision[:12]}"
    if parts := [now[name][-1] for name in claim.sessions if now[name]]:
        run = parts[0]
        return State.UNVALIDATED, f"{run.entries[-1].session}: {len(run.entries)} of {run.shards} shards"
    return State.UNVALIDATED, "no record"


def table(matrix: Sequence[Row]) -> str:
    """The matrix in Markdown."""
    lines = ["| layer | claim | cell | state | evidence |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {row.layer} | {row.claim} | {row.cell} | {row.state.value} | {row.why} |" for row in matrix]
    return "\n".join(lines) + "\n"
