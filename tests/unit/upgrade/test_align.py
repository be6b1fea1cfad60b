# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from qualify.upgrade import align, decisions
from qualify.upgrade.align import AlignmentError, Course, Review

DAY = datetime.date(2026, 11, 29)
STAY = Review(DAY, "0.28.0", "0.30.0", Course.STAY, "", 'no "need"', "", "who")
UPGRADE = replace(STAY, course=Course.UPGRADE, target="0.30.0", reason="the next even line")


@pytest.mark.parametrize("review", [STAY, UPGRADE], ids=["stay", "upgrade"])
def test_both_courses_are_recorded_and_read_back(tmp_path: Path, review: Review) -> None:
    path = align.record(review, tmp_path)
    (found,) = decisions.load(tmp_path)
    assert path.name == "2026-11-29-alignment.toml"
    assert (found.chosen, found.reason, found.date) == (review.course.value, review.reason, DAY)
    assert "2026-12-30" in found.consequences
    with pytest.raises(AlignmentError, match="not overwritten"):
        align.record(review, tmp_path)


@pytest.mark.parametrize(
    ("review", "word"),
    [
        (replace(STAY, latest="0.31.0"), "3 minors behind"),
        (replace(STAY, target="0.30.0"), "names no target"),
        (replace(STAY, reason=" "), "names its reason"),
        (replace(STAY, latest="0.27.0"), "older than ours"),
        (replace(STAY, latest="next"), "no release of the form"),
        (replace(UPGRADE, target="0.29.0"), "not of an even minor"),
        (replace(UPGRADE, target="0.32.0"), "does not lie between"),
        (replace(UPGRADE, target="0.26.0"), "does not lie between"),
        (replace(UPGRADE, target="1.30.0"), "no release of the form"),
    ],
)
def test_what_the_policy_does_not_allow_is_refused(tmp_path: Path, review: Review, word: str) -> None:
    with pytest.raises(AlignmentError, match=word):
        align.record(review, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "review",
    [
        replace(STAY, latest="0.33.0", exception="no GPU"),
        replace(UPGRADE, target="0.29.0", exception="a fix"),
    ],
    ids=["a longer stay", "an odd line"],
)
def test_a_stated_exception_allows_it_and_is_recorded(tmp_path: Path, review: Review) -> None:
    assert review.exception in decisions.read(align.record(review, tmp_path)).consequences


def test_a_review_falls_due_after_a_month(tmp_path: Path) -> None:
    assert "no alignment review" in align.overdue((), DAY)
    align.record(STAY, tmp_path)
    recorded = decisions.load(tmp_path)
    assert align.overdue(recorded, DAY + datetime.timedelta(days=31)) == ""
    assert "32 days old" in align.overdue(recorded, DAY + datetime.timedelta(days=32))
