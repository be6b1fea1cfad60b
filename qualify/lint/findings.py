# SPDX-License-Identifier: Apache-2.0
"""What a rule reports, and how a line of source allows it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_ALLOW = re.compile(r"#\s*lint: allow (?P<rule>[a-z-]+)(?P<rest>.*)$")


@dataclass(frozen=True, order=True)
class Finding:
    """One fault: where it is, which rule it breaks and, in a sentence, what is wrong."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def without_allowed(path: str, source: str, findings: Iterable[Finding]) -> list[Finding]:
    """`findings` of one file less those that a comment allows, plus each allowance that is itself a fault."""
    left = list(findings)
    faults: list[Finding] = []
    for number, line in enumerate(source.splitlines(), start=1):
        match = _ALLOW.search(line)
        if match is None:
            continue
        if len(match["rest"].lstrip(": ").strip()) < 10:
            faults.append(Finding(path, number, "allowance", "say why, as in `# lint: allow RULE: reason`"))
            continue
        covered = {number, number + 1} if line.lstrip().startswith("#") else {number}
        kept = [f for f in left if not (f.rule == match["rule"] and f.line in covered)]
        if len(kept) == len(left):
            faults.append(Finding(path, number, "allowance", f"allows no {match['rule']} finding: remove it"))
        left = kept
    return left + faults
