# SPDX-License-Identifier: Apache-2.0
"""Paired statistics of two sides that answered the same rows: exact, standard library only.

A row is *lost* when native answers it rightly and AFD does not, *won* the other way round; the other rows say
nothing about a difference. If the sides were equally good, each lost-or-won row would be lost with probability
one half, so McNemar's test is exact in the binomial distribution. It is one-sided: only losses can fail the gate,
and the number of wins is reported.

What a sample can see depends on how many rows change sides without a cause. `smallest_drop` takes that rate as an
assumption and says so: rows are independent, a noisy row is lost or won evenly, and a fault adds losses only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

SIGNIFICANCE = 0.05
POWER = 0.95
LARGEST_DROP = 0.02
"""The drop in accuracy that a gate must be able to see with `POWER`, and that no pass may show."""


@dataclass(frozen=True)
class Paired:
    """Two sides over the same rows: how many both, one or none answered rightly."""

    both: int
    lost: int
    won: int
    neither: int

    @classmethod
    def of(cls, native: Sequence[bool], afd: Sequence[bool]) -> Paired:
        """Count row by row; ValueError when the sides have not the same number of rows, or none."""
        if len(native) != len(afd) or not native:
            raise ValueError(f"{len(native)} native rows cannot be paired with {len(afd)} rows of AFD")
        pairs = list(zip(native, afd, strict=True))
        return cls(
            *(pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False)))
        )

    @property
    def rows(self) -> int:
        """All rows."""
        return self.both + self.lost + self.won + self.neither

    @property
    def native(self) -> float:
        """Accuracy of the native side."""
        return (self.both + self.lost) / self.rows

    @property
    def afd(self) -> float:
        """Accuracy of the AFD side."""
        return (self.both + self.won) / self.rows

    @property
    def drop(self) -> float:
        """How much worse AFD is; negative when it is better."""
        return (self.lost - self.won) / self.rows

    @property
    def p_value(self) -> float:
        """Probability of at least this many losses among the changed rows if the sides were equally good."""
        return upper_tail(self.lost + self.won, 0.5, self.lost)

    def __add__(self, other: Paired) -> Paired:
        """Both together, as when tasks are pooled."""
        return Paired(
            self.both + other.both,
            self.lost + other.lost,
            self.won + other.won,
            self.neither + other.neither,
        )


def upper_tail(trials: int, probability: float, at_least: int) -> float:
    """P(X >= at_least) for a binomial X."""
    if at_least <= 0:
        return 1.0
    return min(1.0, math.fsum(point(trials, probability, k) for k in range(at_least, trials + 1)))


def point(trials: int, probability: float, successes: int) -> float:
    """P(X = successes) for a binomial X."""
    if probability in (0.0, 1.0):
        return float(successes == (trials if probability else 0))
    ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
    odds = successes * math.log(probability) + (trials - successes) * math.log1p(-probability)
    return math.exp(ways + odds)


def needed_losses(changed: int, significance: float = SIGNIFICANCE) -> int:
    """The fewest losses among `changed` rows that the test calls a difference; more than `changed` if none do."""
    tail = 0.0
    for losses in range(changed, -1, -1):
        tail += point(changed, 0.5, losses)
        if tail >= significance:
            return losses + 1
    return 0  # pragma: no cover - the whole distribution is at least any significance


def power(rows: int, drop: float, noise: float, significance: float = SIGNIFICANCE) -> float:
    """The probability that the test sees a true drop.

    Args:
        rows: rows answered by both sides.
        drop: the share of rows that the fault loses.
        noise: the share of rows that change sides without a cause, half of them each way.
    """
    rate = min(1.0, drop + noise)
    if rate == 0.0:
        return 0.0
    share = (drop + noise / 2) / rate
    centre, spread = rows * rate, math.sqrt(rows * rate * (1 - rate))
    first, last = max(0, int(centre - 9 * spread) - 9), min(rows, int(centre + 9 * spread) + 9)
    return math.fsum(
        point(rows, rate, changed) * upper_tail(changed, share, needed_losses(changed, significance))
        for changed in range(first, last + 1)
    )


@functools.cache
def smallest_drop(
    rows: int, noise: float, wanted: float = POWER, significance: float = SIGNIFICANCE
) -> float:
    """The smallest true drop (a share of rows, to 0.01 points) that the test sees with probability `wanted`."""
    low, high = 0, 10_000
    while high - low > 1:
        middle = (low + high) // 2
        if power(rows, middle / 10_000, noise, significance) >= wanted:
            high = middle
        else:
            low = middle
    return high / 10_000


def smallest_visible_share(rows: int, wanted: float = POWER) -> float:
    """Where the sides must be equal to the bit one changed row fails; the share of rows seen with `wanted`."""
    return float(1 - (1 - wanted) ** (1 / rows))
