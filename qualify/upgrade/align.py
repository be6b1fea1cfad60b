# SPDX-License-Identifier: Apache-2.0
"""The roadmap's monthly review of vLLM alignment: stay or upgrade, recorded either way.

The policy in numbers: the target line is every second minor, at first the even ones; the supported line may be at
most two stable minors behind; an earlier alignment needs a stated exception. A record that breaks the policy is
refused, not corrected.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from qualify.upgrade import decisions
from qualify.upgrade.decisions import Decision, DecisionKind

MOST_BEHIND = 2
REVIEW_DAYS = 31
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class AlignmentError(ValueError):
    """A record that the policy does not allow; the message says which rule."""


class Course(str, Enum):
    """What was decided."""

    STAY = "stay"
    UPGRADE = "upgrade"


@dataclass(frozen=True)
class Review:
    """One monthly review.

    Attributes:
        day: when.
        current: the vLLM release this project is for.
        latest: the newest stable release that was seen.
        course: stay or upgrade.
        target: the release to upgrade to (empty for stay).
        reason: why.
        exception: the critical fix, security need or model capability for an upgrade out of turn.
        decided_by: who answers for it.
    """

    day: datetime.date
    current: str
    latest: str
    course: Course
    target: str
    reason: str
    exception: str
    decided_by: str


def minor(version: str) -> int:
    """The minor number of an exact release `0.MINOR.PATCH`."""
    found = _RELEASE.fullmatch(version)
    if found is None or found[1] != "0":
        raise AlignmentError(f"{version!r} is no release of the form 0.MINOR.PATCH")
    return int(found[2])


def check(review: Review) -> None:
    """Raise AlignmentError when the policy does not allow the review's course."""
    behind = minor(review.latest) - minor(review.current)
    if not review.reason.strip() or not review.decided_by.strip():
        raise AlignmentError("a review names its reason and who decided")
    if behind < 0:
        raise AlignmentError(f"the latest release {review.latest} is older than ours, {review.current}")
    if review.course is Course.STAY:
        if review.target:
            raise AlignmentError("a decision to stay names no target")
        if behind > MOST_BEHIND and not review.exception:
            raise AlignmentError(
                f"{review.current} is {behind} minors behind {review.latest}, the policy allows {MOST_BEHIND}: "
                "upgrade, or state the exception"
            )
        return
    step = minor(review.target) - minor(review.current)
    if step < 0 or minor(review.target) > minor(review.latest):
        raise AlignmentError(f"{review.target} does not lie between {review.current} and {review.latest}")
    if minor(review.target) % 2 and not review.exception:
        raise AlignmentError(f"{review.target} is not of an even minor line: state the exception")


def render(review: Review) -> str:
    """The record as TOML."""
    text = {
        "kind": DecisionKind.ALIGNMENT.value,
        "subject": f"{review.current} to {review.target or review.current}",
        "chosen": review.course.value,
        "reason": review.reason,
        "consequences": _consequences(review),
        "decided_by": review.decided_by,
    }
    lines = [
        f"date = {review.day.isoformat()}",
        *(f"{name} = {_quoted(value)}" for name, value in text.items()),
    ]
    return "\n".join(lines) + "\n"


def _consequences(review: Review) -> str:
    seen = f"Newest stable release seen: {review.latest}."
    exception = f" Exception: {review.exception}." if review.exception else ""
    due = review.day + datetime.timedelta(days=REVIEW_DAYS)
    return f"{seen}{exception} Next review by {due.isoformat()}."


def _quoted(text: str) -> str:
    clean = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{" ".join(clean.split())}"'


def record(review: Review, folder: Path) -> Path:
    """Check and write the review; one per day, never overwritten."""
    check(review)
    path = folder / f"{review.day.isoformat()}-alignment.toml"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as sink:
            sink.write(render(review))
    except FileExistsError as error:
        raise AlignmentError(f"{path.name} exists: a recorded decision is not overwritten") from error
    decisions.read(path)
    return path


def overdue(recorded: Iterable[Decision], today: datetime.date) -> str:
    """Why a review is due, or the empty string."""
    days = [d.date for d in recorded if d.kind is DecisionKind.ALIGNMENT]
    if not days:
        return "no alignment review has been recorded"
    late = (today - max(days)).days
    return f"the last alignment review is {late} days old" if late > REVIEW_DAYS else ""
