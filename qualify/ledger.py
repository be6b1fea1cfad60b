# SPDX-License-Identifier: Apache-2.0
"""The evidence: one append-only file of JSON lines per cell, each record hashed over the one before.

A record says what was run, on what, and how it ended. Its hash covers everything in it and the hash of the
record before, so that an edit shows from there on. A file that was rewritten whole is consistent in itself:
only the head hash that a tag or an attestation carries, or an earlier commit of the file, shows that.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from qualify.cells import ROOT
from qualify.identity import Binding
from qualify.phases import Phase, Status
from qualify.process import capture

DIRECTORY = ROOT / "evidence"
SCHEMA_FILE = "schema.json"
GENESIS = "0" * 64


class LedgerError(ValueError):
    """The ledger is not what it was written as; the message names the line and what does not fit."""


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What pytest itself reported of the cases of one session or shard."""

    collected: int
    passed: int
    failed: int
    error: int
    skipped: int
    xfailed: int


class Teardown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a session left behind when it had ended."""

    processes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing was left."""
        return not self.processes and not self.files


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one session says, before it is chained: the workflow's five fields and how they came about.

    `session` is empty only in the opening entry of a chain, which freezes the identity. `expected` is the digest
    of the list of cases that had to run. `cause` names the infrastructure exit that allows another attempt.
    """

    cell: str
    lock: str
    revision: str
    environment: str
    profile: str
    session: str
    shard: str = ""
    attempt: int = 1
    phase: Phase
    status: Status
    evidence: tuple[str, ...] = ()
    blocker: str = "none"
    next_allowed_action: str
    command: tuple[str, ...] = ()
    started: str
    seconds: float
    counts: Counts | None = None
    expected: str | None = None
    metrics: Mapping[str, float] = {}
    logs: Mapping[str, str] = {}
    teardown: Teardown = Teardown()
    cause: str | None = None

    @property
    def binding(self) -> Binding:
        """What this entry is bound to."""
        return Binding(self.cell, self.lock, self.revision, self.environment)

    @property
    def own_failure(self) -> bool:
        """Whether it failed by the project's own fault: in a qualifying chain that stands at its revision."""
        return self.status is Status.FAIL and self.cause is None

    @property
    def key(self) -> tuple[str, str]:
        """Which part of a chain this is."""
        return self.session, self.shard

    @property
    def title(self) -> str:
        """The part's name for a reader."""
        return f"{self.session} {self.shard}".strip()


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the ledger."""

    schema: int
    sequence: int
    previous: str
    entry: Entry
    hash: str


SCHEMA = 1


def hash_of(schema: int, sequence: int, previous: str, entry: Entry) -> str:
    """SHA-256 over all of a record but its own hash, in one canonical form."""
    content = {"schema": schema, "sequence": sequence, "previous": previous, "entry": entry}
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def chained(entry: Entry, after: Record | None) -> Record:
    """The record that adds `entry` to a ledger that ends with `after`."""
    sequence = 0 if after is None else after.sequence + 1
    previous = GENESIS if after is None else after.hash
    return Record(SCHEMA, sequence, previous, entry, hash_of(SCHEMA, sequence, previous, entry))


def encode(record: Record) -> bytes:
    """A record as its line, in the one form that is accepted when it is read back."""
    return msgspec.json.encode(record, order="sorted") + b"\n"


def decode(content: bytes, source: str = "ledger") -> tuple[Record, ...]:
    """The records of a ledger; LedgerError at the first line that is not exactly what was written."""
    records: list[Record] = []
    if content and not content.endswith(b"\n"):
        raise LedgerError(f"{source}: the last line is cut short")
    for number, line in enumerate(content.splitlines(keepends=True)):
        where = f"{source}:{number + 1}"
        try:
            record = msgspec.json.decode(line, type=Record)
        except msgspec.MsgspecError as error:
            raise LedgerError(f"{where}: not a record: {error}") from error
        before = records[-1] if records else None
        previous = before.hash if before else GENESIS
        if record.schema != SCHEMA:
            raise LedgerError(f"{where}: schema {record.schema}, this program knows {SCHEMA}")
        if record.sequence != number or record.previous != previous:
            raise LedgerError(
                f"{where}: does not follow the record before it (sequence {record.sequence}, expected {number}): "
                "a record was removed, added or moved"
            )
        if record.hash != hash_of(record.schema, record.sequence, record.previous, record.entry):
            raise LedgerError(f"{where}: its content does not have its hash: it was edited")
        if line != encode(record):
            raise LedgerError(f"{where}: is not in the form that it was written in")
        records.append(record)
    return tuple(records)


def path_of(cell: str, directory: Path = DIRECTORY) -> Path:
    """Where a cell's ledger lies."""
    return directory / f"{cell}.jsonl"


def read(cell: str, directory: Path = DIRECTORY) -> tuple[Record, ...]:
    """A cell's records; none when it has no ledger yet."""
    path = path_of(cell, directory)
    return decode(path.read_bytes(), path.name) if path.is_file() else ()


def append(entry: Entry, directory: Path = DIRECTORY) -> Record:
    """Add one entry to its cell's ledger, on the disk when this returns. The whole ledger is checked first."""
    directory.mkdir(parents=True, exist_ok=True)
    records = read(entry.cell, directory)
    record = chained(entry, records[-1] if records else None)
    with path_of(entry.cell, directory).open("ab") as handle:
        handle.write(encode(record))
        handle.flush()
        os.fsync(handle.fileno())
    return record


def schema() -> bytes:
    """The JSON schema of a line, as it is published in `evidence/schema.json`."""
    return (
        msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Record), order="sorted"), indent=1)
        + b"\n"
    )


def histories(path: Path, root: Path = ROOT) -> Sequence[tuple[str, bytes]]:
    """Each committed state of a ledger, oldest first, with its commit."""
    name = path.relative_to(root).as_posix()
    commits = capture(["git", "log", "--reverse", "--format=%H", "--", name], cwd=root).stdout.split()
    states = []
    for commit in commits:
        shown = capture(["git", "show", f"{commit}:{name}"], cwd=root, check=False)
        if shown.returncode == 0:
            states.append((commit, shown.stdout.encode()))
    return states
