# SPDX-License-Identifier: Apache-2.0
"""PRODUCE_STAGED_PLAN: what each change costs here, in which order, and what is done about each seam."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qualify.audit.symbols import belongs
from qualify.upgrade.assess import Assessment
from qualify.upgrade.dependencies import Disposition
from qualify.upgrade.rules import Grade

STAGES = (
    ("version and configuration", ("vllm.config", "vllm.engine", "vllm.platforms", "vllm.plugins", "vllm.usage")),
    ("engine and compatibility", ("vllm.v1.engine", "vllm.v1.core", "vllm.v1.executor", "vllm.entrypoints")),
    ("model construction and weights", ("vllm.model_executor", "vllm.models", "vllm.lora")),
    ("graphs and microbatches", (
        "vllm.compilation", "vllm.forward_context", "vllm.v1.worker.ubatching", "vllm.v1.worker.ubatch_utils",
        "vllm.v1.worker.gpu_ubatch_wrapper", "vllm.v1.worker.workspace",
    )),
    ("workers and model runners", ("vllm.v1", "vllm.sequence")),
    ("connectors and topology", ("vllm.distributed", "vllm.utils")),
    ("everything else", ("vllm", "torch")),
)  # fmt: skip
"""The order of work and the modules of each stage; the first that fits takes a symbol."""

RISKS = {
    Grade.UNCHANGED: "none from upstream",
    Grade.MECHANICAL: "import or call breaks loudly; the type checker and the audit see it",
    Grade.BEHAVIORAL: "runs and does something else: order, arguments, returned values or ownership",
    Grade.ARCHITECTURAL: "no local adaptation keeps the invariant",
}


@dataclass(frozen=True)
class Row:
    """One line of the impact matrix: all symbols of one entry."""

    id: str
    grade: Grade
    symbols: tuple[str, ...]
    cause: tuple[str, ...]
    files: tuple[str, ...]
    invariant: str
    disposition: Disposition | None
    now: str
    tests: tuple[str, ...]
    risk: str


@dataclass(frozen=True)
class Stage:
    """One reviewable step."""

    name: str
    rows: tuple[Row, ...]


def stages(findings: Iterable[Assessment]) -> tuple[Stage, ...]:
    """The staged plan; entries that nothing happened to are left out, so are stages without an entry."""
    grouped: dict[str, dict[str, list[Assessment]]] = {name: {} for name, _ in STAGES}
    for finding in findings:
        if finding.verdict.grade is not Grade.UNCHANGED:
            grouped[stage_of(finding.use.symbol.module)].setdefault(finding.use.id, []).append(finding)
    return tuple(
        Stage(name, tuple(row(group) for group in entries.values()))
        for name, entries in grouped.items()
        if entries
    )


def stage_of(module: str) -> str:
    """The stage that a module of vLLM belongs to."""
    return next(
        (name for name, prefixes in STAGES if any(belongs(module, p) for p in prefixes)), STAGES[-1][0]
    )


def row(group: list[Assessment]) -> Row:
    """The findings of one entry as a line."""
    worst = max(group, key=lambda finding: finding.verdict.grade)
    use = worst.use
    return Row(
        id=use.id,
        grade=worst.verdict.grade,
        symbols=tuple(dict.fromkeys(str(f.use.symbol) for f in group)),
        cause=tuple(dict.fromkeys(reason for f in group for reason in f.verdict.reasons))[:4],
        files=use.used_by,
        invariant=use.invariant,
        disposition=use.disposition or proposed(worst.verdict.grade),
        now=use.now,
        tests=use.tests,
        risk=RISKS[worst.verdict.grade],
    )


def proposed(grade: Grade) -> Disposition | None:
    """A disposition where none is recorded: a proposal only, the plan's reader decides."""
    if grade is Grade.UNCHANGED:
        return None
    return Disposition.STOP if grade is Grade.ARCHITECTURAL else Disposition.PORT
