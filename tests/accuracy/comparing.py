# SPDX-License-Identifier: Apache-2.0
"""The numeric probe: row by row, what each layer and each MLP gave under AFD against what it gave natively.

Only rows that both sides computed from the same tokens are compared: those of an answer up to the first token in which
the two differ. So a fault is seen where it is, and not in what follows from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afd_plugin.demo.records import Generation, Record

NORM_RANGE = (0.99, 1.01)
RELATIVE_ERROR = {"bfloat16": 2.0**-7}
"""Largest relative error of a row that a correct layer may show: half a unit in the last place of bfloat16, twice."""

_TINY = 1e-6


@dataclass(frozen=True)
class Probe:
    """Outputs by name (`layer-N`, `mlp-N`), each [rows, hidden], and the answers of the run, in its order."""

    outputs: dict[str, np.ndarray]
    answers: tuple[Generation, ...]

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [list(answer.token_ids) for answer in self.answers]


def read(folder: Path, record: Record, hidden: int) -> Probe:
    """What the probes of one run have written; ValueError unless there is a row for each token that was computed."""
    outputs = {
        path.stem: np.fromfile(path, dtype=np.float32).reshape(-1, hidden)
        for path in sorted(folder.glob("*.bin"))
    }
    wanted = sum(map(rows_of, record.generations))
    for name, rows in outputs.items():
        if len(rows) != wanted:
            raise ValueError(f"{name} has {len(rows)} rows; the answers took {wanted}")
    return Probe(outputs, record.generations)


def rows_of(answer: Generation) -> int:
    """The rows of one answer, alone in its steps: its prompt, and each generated token but the last."""
    return len(answer.prompt_token_ids) + len(answer.token_ids) - 1


def common_rows(native: Sequence[Generation], afd: Sequence[Generation]) -> np.ndarray:
    """Which rows [rows] both sides computed from the same tokens. Both sides have the same lengths."""
    masks = []
    for wanted, found in zip(native, afd, strict=True):
        if (wanted.prompt_token_ids, len(wanted.token_ids)) != (found.prompt_token_ids, len(found.token_ids)):
            raise ValueError("the two runs were not asked the same")
        equal = [left == right for left, right in zip(wanted.token_ids, found.token_ids, strict=True)]
        same = equal.index(False) if False in equal else len(equal)
        masks.append(np.arange(rows_of(wanted)) < len(wanted.prompt_token_ids) + same)
    return np.concatenate(masks)


@dataclass(frozen=True)
class Layer:
    """One layer or MLP over the rows that are compared.

    `errors` [rows] are relative to the norm of native's row; `lost` counts rows of zeros where native has none.
    """

    name: str
    errors: np.ndarray
    norm_ratio: float
    lost: int
    exact: bool

    def faults(self, dtype: str) -> list[str]:
        """What a correct layer would not show; each a sentence."""
        found = []
        if not np.isfinite(self.errors).all():
            found.append(f"{self.name} has numbers that are none")
        if not NORM_RANGE[0] <= self.norm_ratio <= NORM_RANGE[1]:
            found.append(f"{self.name} has {self.norm_ratio:.4f} of native's norm")
        if wrong := int((self.errors > RELATIVE_ERROR[dtype]).sum()):
            found.append(
                f"{self.name} differs in {wrong} of {len(self.errors)} rows, by up to {self.errors.max():.2e}"
            )
        if self.lost:
            found.append(f"{self.name} has lost {self.lost} of {len(self.errors)} rows")
        return found


def compare(native: Probe, afd: Probe) -> list[Layer]:
    """Every layer and MLP, in the order of their names; ValueError unless both sides wrote the same ones."""
    if native.outputs.keys() != afd.outputs.keys():
        raise ValueError("the two runs observed different layers")
    rows = common_rows(native.answers, afd.answers)
    layers = []
    for name in sorted(native.outputs):
        wanted, found = native.outputs[name][rows], afd.outputs[name][rows]
        norms, present = np.linalg.norm(wanted, axis=1), np.linalg.norm(found, axis=1)
        layers.append(
            Layer(
                name,
                np.linalg.norm(found - wanted, axis=1) / np.maximum(norms, _TINY),
                float(np.linalg.norm(found) / max(np.linalg.norm(wanted), _TINY)),
                int(((present == 0) & (norms > 0)).sum()),
                bool(np.array_equal(found, wanted)),
            )
        )
    return layers


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest error of a row as a share of the row's norm."""
    norms = np.linalg.norm(wanted, axis=1)
    return float((np.linalg.norm(found - wanted, axis=1) / np.maximum(norms, _TINY)).max())
