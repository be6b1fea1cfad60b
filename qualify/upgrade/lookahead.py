# SPDX-License-Identifier: Apache-2.0
"""What a newer vLLM would do to our seams, from its wheel alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from afd_plugin.seams.schema import Registry
from qualify.upgrade import changes
from qualify.upgrade.assess import Assessment, Comparison, assess
from qualify.upgrade.dependencies import seams
from qualify.upgrade.plan import RISKS
from qualify.upgrade.planning import grades
from qualify.upgrade.rules import RULES, Grade
from qualify.upgrade.text import change, code, reasons, table
from qualify.upgrade.trees import Identity, Tree


@dataclass(frozen=True)
class Outlook:
    """The difference from our vLLM to a newer one, as our seams see it."""

    current: Identity
    ahead: Identity
    findings: tuple[Assessment, ...]
    symbols: dict[str, int]

    def of(self, grade: Grade) -> tuple[Assessment, ...]:
        """The findings of one grade."""
        return tuple(f for f in self.findings if f.verdict.grade is grade)

    @property
    def missing(self) -> tuple[Assessment, ...]:
        """What our registry names and our own vLLM does not have: the registry is for another tree."""
        return tuple(f for f in self.findings if f.evidence.old is None)


def look(current: Tree, ahead: Tree, registry: Registry) -> Outlook:
    """Judge every registered use (those of torch apart, whose source no vLLM wheel holds)."""
    diff = changes.diff(current, ahead)
    uses = [use for use in seams(registry) if use.symbol.upstream]
    found = assess(uses, Comparison(current, ahead, diff))
    return Outlook(current.identity, ahead.identity, found, diff.counts())


def render(outlook: Outlook) -> str:
    """The outlook as Markdown, gravest first."""
    return "\n".join(_lines(outlook)).rstrip() + "\n"


def _lines(outlook: Outlook) -> Iterator[str]:
    current, ahead = outlook.current, outlook.ahead
    yield from (f"# Lookahead: vLLM {current.version} to {ahead.version}", "")
    yield f"Target: {ahead.source} {code(ahead.name)}, commit {code(ahead.commit)}, sha256 {code(ahead.sha256)}."
    pins = sorted(set(current.requires) | set(ahead.requires))
    moved = [f"{n} {current.requires.get(n, '-')} to {ahead.requires.get(n, '-')}" for n in pins]
    moved = [m for n, m in zip(pins, moved, strict=True) if current.requires.get(n) != ahead.requires.get(n)]
    yield f"Requirements that moved: {'; '.join(moved) or 'none'}."
    yield f"{len(outlook.findings)} uses: {grades(outlook.findings)}."
    yield ""
    if outlook.missing:
        yield f"Not in our own vLLM either: {', '.join(code(str(f.use.symbol)) for f in outlook.missing)}."
        yield ""
    for grade in (Grade.ARCHITECTURAL, Grade.BEHAVIORAL, Grade.MECHANICAL):
        yield from _grade(grade, outlook.of(grade))
    used = sorted({r.split(":")[0] for f in outlook.findings for r in f.verdict.reasons})
    yield from (f"- {name}: {RULES[name]}." for name in used)


def _grade(grade: Grade, findings: Sequence[Assessment]) -> Iterator[str]:
    if not findings:
        return
    yield from (f"## {grade.name}: {RISKS[grade]}", "")
    rows = [
        (f.use.id, code(str(f.use.symbol)), f.use.use.value, change(f), reasons(f), f.use.invariant)
        for f in findings
    ]
    yield from table(("seam", "symbol", "use", "change", "reasons", "invariant to read it against"), rows)
    yield ""
