# SPDX-License-Identifier: Apache-2.0
"""The paired statistics agree with numbers worked out by hand, and see what they say they see."""

import itertools
import math
import random

import pytest

from qualify.accuracy.statistics import (
    LARGEST_DROP,
    POWER,
    SIGNIFICANCE,
    Paired,
    needed_losses,
    point,
    power,
    smallest_drop,
    smallest_visible_share,
    upper_tail,
)


def test_rows_are_paired_one_by_one() -> None:
    paired = Paired.of([True, True, True, False, False], [True, False, False, True, False])
    assert paired == Paired(both=1, lost=2, won=1, neither=1)
    assert paired.native == pytest.approx(0.6)
    assert paired.afd == pytest.approx(0.4)
    assert paired.drop == pytest.approx(0.2)


@pytest.mark.parametrize(("native", "afd"), [([], []), ([True], []), ([True], [True, False])])
def test_sides_that_answered_different_rows_are_not_paired(native: list[bool], afd: list[bool]) -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        Paired.of(native, afd)


@pytest.mark.parametrize(
    ("lost", "won", "expected"),
    [(0, 0, 1.0), (5, 0, 1 / 32), (4, 0, 1 / 16), (0, 5, 1.0), (3, 1, 5 / 16), (8, 2, 56 / 1024)],
)
def test_the_p_value_is_the_exact_binomial_tail(lost: int, won: int, expected: float) -> None:
    assert Paired(100, lost, won, 10).p_value == pytest.approx(expected)


def test_a_binomial_tail_is_the_sum_over_all_outcomes() -> None:
    def enumerated(trials: int, probability: float, at_least: int) -> float:
        return sum(
            math.prod(probability if bit else 1 - probability for bit in bits)
            for bits in itertools.product((0, 1), repeat=trials)
            if sum(bits) >= at_least
        )

    for trials, probability, at_least in ((6, 0.5, 4), (8, 0.2, 3), (7, 0.9, 7), (5, 0.3, 0)):
        found = upper_tail(trials, probability, at_least)
        assert found == pytest.approx(enumerated(trials, probability, at_least))
    assert [point(3, 0.0, k) for k in range(4)] == [1, 0, 0, 0]
    assert [point(3, 1.0, k) for k in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize("changed", range(40))
def test_the_fewest_losses_are_just_significant(changed: int) -> None:
    losses = needed_losses(changed)
    assert upper_tail(changed, 0.5, losses) < SIGNIFICANCE or losses > changed
    assert upper_tail(changed, 0.5, losses - 1) >= SIGNIFICANCE


def test_power_is_what_a_simulation_finds() -> None:
    rows, drop, noise, runs = 1500, 0.012, 0.01, 1500
    rng, seen = random.Random(7), 0
    for _ in range(runs):
        draws = [rng.random() for _ in range(rows)]
        lost = sum(draw < drop + noise / 2 for draw in draws)
        won = sum(drop + noise / 2 <= draw < drop + noise for draw in draws)
        seen += upper_tail(lost + won, 0.5, lost) < SIGNIFICANCE
    assert power(rows, drop, noise) == pytest.approx(seen / runs, abs=0.03)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02])
def test_at_1500_rows_a_drop_of_two_points_is_seen_with_95_percent_power(noise: float) -> None:
    smallest = smallest_drop(1500, noise)
    assert smallest <= LARGEST_DROP
    assert power(1500, smallest, noise) >= POWER > power(1500, smallest - 0.001, noise)


def test_fewer_rows_see_less() -> None:
    assert smallest_drop(300, 0.005) > LARGEST_DROP > smallest_drop(1500, 0.005)


def test_equality_to_the_bit_sees_a_smaller_share_than_any_test_of_scores() -> None:
    share = smallest_visible_share(1500)
    assert (1 - share) ** 1500 == pytest.approx(1 - POWER)
    assert share < smallest_drop(1500, 0.0)
