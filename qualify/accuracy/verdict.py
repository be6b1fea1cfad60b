# SPDX-License-Identifier: Apache-2.0
"""Whether one AFD layout passed against native on the same rows: pure, from the two sides' answers.

The only reference is native on the same cell in the same run. No threshold is read from an earlier run or a file, so
none can be lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qualify.accuracy.scoring import Side, differing
from qualify.accuracy.statistics import LARGEST_DROP, SIGNIFICANCE, Paired, smallest_drop

NATIVE_RANGE = (0.70, 0.97)
"""Outside it a model is too weak or too strong for a difference to show in both directions."""

FEWEST_ROWS = 1500


@dataclass(frozen=True)
class Comparison:
    """One AFD layout against native: all rows, by task, and how many answers are not the same to the bit."""

    pooled: Paired
    by_task: Mapping[str, Paired]
    differing: Mapping[str, int]
    bitwise: bool

    @classmethod
    def of(cls, native: Side, afd: Side, *, bitwise: bool) -> Comparison:
        """Pair the sides row by row, task by task."""
        by_task = {
            task: Paired.of([row.right for row in rows], [row.right for row in afd.rows[task]])
            for task, rows in native.rows.items()
        }
        return cls(Paired.of(native.right, afd.right), by_task, differing(native, afd), bitwise)

    @property
    def noise(self) -> float:
        """The rate of rows that change sides without a cause, as far as this run can tell: twice the wins."""
        return 2 * self.pooled.won / self.pooled.rows

    @property
    def visible_drop(self) -> float:
        """The smallest true drop that these rows would have shown with 95% power, at that noise."""
        return smallest_drop(self.pooled.rows, self.noise)

    def faults(
        self, native_range: tuple[float, float] = NATIVE_RANGE, fewest_rows: int = FEWEST_ROWS
    ) -> tuple[str, ...]:
        """One sentence for each reason not to pass."""
        pooled, said = self.pooled, []
        low, high = native_range
        if not low <= pooled.native <= high:
            said.append(f"native accuracy is {pooled.native:.3f}, outside {low:.4g} to {high:.4g}")
        if pooled.rows < fewest_rows:
            said.append(f"{pooled.rows} rows are a diagnosis; a gate needs {fewest_rows}")
        elif self.visible_drop > LARGEST_DROP:
            said.append(f"a drop of {self.visible_drop:.4f} is the smallest that shows; {LARGEST_DROP} must")
        if pooled.p_value < SIGNIFICANCE:
            said.append(
                f"AFD lost {pooled.lost} rows and won {pooled.won}: p = {pooled.p_value:.2g} if it were as good"
            )
        if pooled.drop > LARGEST_DROP:
            said.append(f"AFD is {pooled.drop:.4f} worse than native, more than {LARGEST_DROP}")
        if self.bitwise and any(self.differing.values()):
            changed = {task: count for task, count in self.differing.items() if count}
            said.append(f"answers that should be equal to the bit are not: {changed}")
        return tuple(said)

    def metrics(self, prefix: str) -> dict[str, float]:
        """What goes into the record."""
        pooled = self.pooled
        return {
            f"{prefix}_rows": pooled.rows,
            f"{prefix}_native": pooled.native,
            f"{prefix}_afd": pooled.afd,
            f"{prefix}_lost": pooled.lost,
            f"{prefix}_won": pooled.won,
            f"{prefix}_p_value": pooled.p_value,
            f"{prefix}_differing": sum(self.differing.values()),
            f"{prefix}_visible_drop": self.visible_drop,
        }
