# SPDX-License-Identifier: Apache-2.0
"""Judge what lm-eval returned, before any number of it is believed.

Every requested row must have been scored, once; an answer that is not a number where one is due, that is empty,
or that is the same for every row of a task is a broken run and no score.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = ("exact_match", "acc")
EMPTY_ROWS, EMPTY_SHARE = 2, 0.02
"""A trained model may end at once in a rare row; a broken service does so in many."""


class Unscorable(RuntimeError):
    """The outputs of a side are not a result; the message says which rows and why."""


@dataclass(frozen=True)
class Row:
    """One answered row: `said` is the text, or the log probabilities of the choices as lm-eval received them."""

    number: int
    right: bool
    said: tuple[str, ...]


@dataclass(frozen=True)
class Side:
    """One side's answers by task, and the digests of the bytes they were read from."""

    rows: Mapping[str, tuple[Row, ...]]
    results: str
    samples: str

    @property
    def right(self) -> list[bool]:
        """Whether each row was answered rightly, task after task."""
        return [row.right for rows in self.rows.values() for row in rows]

    @property
    def scored(self) -> int:
        """All rows."""
        return sum(map(len, self.rows.values()))


def read(path: Path, requested: Mapping[str, int]) -> Side:
    """The rows in the file of `harness.run`.

    Args:
        path: what lm-eval returned, as written.
        requested: number of rows by task; no more and no fewer must have been scored.
    """
    found = json.loads(path.read_bytes())
    samples: Mapping[str, list[dict[str, Any]]] = found["samples"]
    if set(samples) != set(requested):
        raise Unscorable(f"tasks {sorted(samples)} were scored, {sorted(requested)} were requested")
    rows = {task: _rows(task, samples[task], requested[task]) for task in requested}
    for task, count in requested.items():
        _compare_score(task, rows[task], found["results"][task], count)
    raw = json.dumps(samples, sort_keys=True).encode()
    return Side(rows, _sha256(path.read_bytes()), _sha256(raw))


def _rows(task: str, samples: Sequence[Mapping[str, Any]], requested: int) -> tuple[Row, ...]:
    rows = sorted((_row(task, sample) for sample in samples), key=lambda row: row.number)
    if [row.number for row in rows] != list(range(requested)):
        raise Unscorable(f"{task}: {requested} rows were requested, {len(rows)} were scored")
    said = [row.said for row in rows]
    empty = [row.number for row in rows if not all(part.strip() for part in row.said)]
    if len(empty) > max(EMPTY_ROWS, EMPTY_SHARE * requested):
        raise Unscorable(f"{task}: {len(empty)} of {requested} answers are empty, row {empty[0]} first")
    if requested > 1 and len(set(said)) == 1:
        raise Unscorable(f"{task}: all {requested} answers are the same: {said[0]!r}")
    return tuple(rows)


def _row(task: str, sample: Mapping[str, Any]) -> Row:
    number = int(sample["doc_id"])
    metric = next((name for name in METRICS if name in sample), None)
    if metric is None or sample[metric] not in (0, 1):
        raise Unscorable(f"{task}: row {number} has no score of 0 or 1")
    said = tuple(_said(task, number, answer) for answer in sample["resps"])
    if not said:
        raise Unscorable(f"{task}: row {number} has no answer")
    return Row(number, bool(sample[metric]), said)


def _said(task: str, number: int, answer: Any) -> str:
    """One answer of lm-eval: `[text]`, or `[[log probability, is greedy]]`."""
    inner = answer[0]
    if isinstance(inner, str):
        return inner
    score = float(inner[0])
    if not math.isfinite(score) or score > 0:
        raise Unscorable(f"{task}: row {number} has the log probability {inner[0]}")
    return repr(score)


def _compare_score(task: str, rows: Sequence[Row], result: Mapping[str, Any], count: int) -> None:
    """lm-eval's own mean must be that of its samples: the two are computed apart."""
    own = sum(row.right for row in rows) / count
    said = [value for name, value in result.items() if name.partition(",")[0] in METRICS]
    if len(said) != 1 or not math.isfinite(said[0]) or abs(said[0] - own) > 1e-9:
        raise Unscorable(f"{task}: lm-eval reports {said}, its samples give {own}")


def differing(native: Side, afd: Side) -> dict[str, int]:
    """By task, the rows whose answer is not the same to the last character or bit."""
    return {
        task: sum(one.said != other.said for one, other in zip(rows, afd.rows[task], strict=True))
        for task, rows in native.rows.items()
    }


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
