# SPDX-License-Identifier: Apache-2.0
"""Markdown building blocks of this package's reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qualify.upgrade.assess import Assessment


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; cells are one line each."""
    lines = [_line(header), _line(["---"] * len(header))]
    return [*lines, *(_line(row) for row in rows)]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(cell(value) for value in cells) + " |"


def cell(value: object) -> str:
    """A value as the text of a table cell."""
    return " ".join(str(value).split()).replace("|", "\\|") or "-"


def code(value: str) -> str:
    """A value as code; nothing when it is empty."""
    return f"`{value}`" if value else ""


def reasons(finding: Assessment) -> str:
    """Why a finding has its grade."""
    return "; ".join(finding.verdict.reasons) or "definition and callers are equal"


def change(finding: Assessment) -> str:
    """What happened to the symbol, in a word or two."""
    seen = finding.evidence
    if seen.new is None:
        return "gone" if seen.old else "in neither tree"
    if seen.old is None:
        return "new"
    if seen.old == seen.new:
        delta = seen.delta
        header = not delta.header_only_grew or delta.optional or delta.decorators or delta.bases
        parts = ["header"] * bool(header) + ["body"] * delta.body + ["members"] * bool(seen.members_changed)
        return ", ".join(parts) or ("callers" if finding.verdict.reasons else "equal")
    return "moved" if seen.old.qualname == seen.new.qualname else "renamed"
