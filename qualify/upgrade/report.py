# SPDX-License-Identifier: Apache-2.0
"""The planning audit's report as Markdown: the only thing a planning audit leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from qualify.phases import Mode
from qualify.upgrade import freeze, inventory, planning
from qualify.upgrade.assess import Assessment
from qualify.upgrade.changes import Kind, TreeDiff
from qualify.upgrade.gate import Outcome, subsystem
from qualify.upgrade.rules import RULES, Grade
from qualify.upgrade.text import change, code, reasons, table
from qualify.upgrade.trees import UNKNOWN

_AREAS_LISTED = ("feature", "refusal", "native source", "recipe", "tests")


def render(audit: planning.Audit, command: str, day: str) -> str:
    """The whole report. A blocked identity yields the blocker plan and nothing else."""
    lines = [
        f"# Planning audit: vLLM {audit.subject}",
        "",
        f"Made on {day} by `{command}`. Mode: {Mode.PLANNING_AUDIT.value}. Readiness: {audit.workflow.readiness()}.",
        "Nothing but this report was written; neither vLLM tree was changed, and neither was imported.",
        "",
        *_phases(audit),
        *_identity(audit.frozen),
    ]
    if audit.frozen.blockers:
        lines += _blocker_plan(audit.frozen)
        return "\n".join(lines).rstrip() + "\n"
    if audit.diff is not None:
        lines += [
            *_inventory(audit),
            *_difference(audit, audit.diff),
            *_classification(audit),
            *_dispositions(audit),
            *_our_seams(audit),
        ]
        lines += [*_gate(audit), *_plan(audit), *_closing(audit)]
    return "\n".join(lines).rstrip() + "\n"


def _phases(audit: planning.Audit) -> Iterator[str]:
    yield from ("## Phases", "")
    rows = [
        (r.phase.value, r.status.value, "; ".join(r.evidence), r.blocker, r.next_allowed_action)
        for r in audit.workflow.records
    ]
    yield from table(("phase", "status", "evidence", "blocker", "next allowed action"), rows)
    yield ""


def _identity(frozen: freeze.Frozen) -> Iterator[str]:
    yield from ("## Identity", "")
    sides = (frozen.current, frozen.target)
    rows = [
        (name, *(code(str(vars(side)[field])) for side in sides))
        for name, field in (
            ("version", "version"),
            ("commit it states", "commit"),
            ("source", "source"),
            ("artifact", "name"),
            ("sha256", "sha256"),
        )
    ]
    rows.insert(2, ("full commit", *(freeze.full_commit(side, frozen.task.statements) for side in sides)))
    for name in sorted({n for side in sides for n in side.requires}):
        rows.append((f"requires {name}", *(code(side.requires.get(name, "")) for side in sides)))
    yield from table(("", "current vLLM", "target vLLM"), rows)
    here = frozen.checkout
    yield ""
    yield from table(
        ("this project", ""),
        (
            ("revision", code(here.head)),
            ("branch", code(here.branch)),
            ("paths that differ from the revision", here.dirty),
            ("mirrored version", f"{code(here.version)}: for vLLM {frozen.target.version} only"),
            ("Python of the audit", here.python),
            ("revision before the upgrade", f"{frozen.task.base}: {frozen.task.base_reason}"),
            (
                "driver, devices, compiler, NCCL, C++ ABI of the target",
                f"{UNKNOWN} here: no hardware is used",
            ),
        ),
    )
    yield ""
    for conflict in frozen.conflicts:
        yield from (f"### Conflict: {conflict.subject}", "")
        yield from table(("value", "said by"), ((code(v), who) for v, who in conflict.values.items()))
        yield ""
        decision = conflict.decision
        if decision is None:
            yield from ("**BLOCKED**: no recorded decision names exactly these values.", "")
        else:
            yield (
                f"Decided on {decision.date} by {decision.decided_by} "
                f"([{decision.name}](decisions/{decision.name}.toml)): {code(decision.chosen)}. {decision.reason} "
                f"{decision.consequences}"
            )
            yield ""


def _blocker_plan(frozen: freeze.Frozen) -> Iterator[str]:
    yield from ("## Blocker plan", "", "The impact matrix and the staged plan are unavailable.", "")
    rows = [
        (number, blocker, _missing(blocker), _next(blocker))
        for number, blocker in enumerate(frozen.blockers, start=1)
    ]
    yield from table(("", "blocker", "missing evidence", "next allowed action"), rows)


def _missing(blocker: str) -> str:
    if blocker.startswith("commit of"):
        return "which commit the release is: a clone with the release's tag, or a decision"
    if "mirrored version" in blocker:
        return "a project version for this target"
    return "the value itself, from an artifact that states it"


def _next(blocker: str) -> str:
    if blocker.startswith("commit of"):
        return "resolve the tag in a clone, or record an identity decision that names every value"
    if "mirrored version" in blocker:
        return "choose the target that mirrors the version, or raise the version first"
    return "give an artifact or a clone that states it"


def _inventory(audit: planning.Audit) -> Iterator[str]:
    yield from ("## Inventory", "", "Found by searching the sources; UNKNOWN until evidence proves it.", "")
    counts = inventory.unknown(audit.items)
    yield from table(("area", "found", "UNKNOWN"), ((a, t, o) for a, (t, o) in sorted(counts.items())))
    yield ""
    for area in _AREAS_LISTED:
        names = dict.fromkeys(item.name for item in audit.items if item.area == area)
        if names:
            yield f"- {area}: {', '.join(code(name) for name in names)}"
    claims = Counter(item.where.partition(":")[0] for item in audit.items if item.area == "claim")
    yield f"- claims: {', '.join(f'{count} in `{path}`' for path, count in sorted(claims.items()))}"
    yield ""


def _difference(audit: planning.Audit, diff: TreeDiff) -> Iterator[str]:
    yield from ("## Difference", "")
    yield f"Files: {_counts(diff.files)}. Symbols: {_counts(diff.counts())}."
    yield ""
    areas: dict[str, Counter[str]] = {}
    for found in diff.changes.values():
        areas.setdefault(subsystem(found.symbol.module), Counter())[found.kind.value] += 1
    kinds = [kind.value for kind in Kind]
    rows = [(area, *(count[kind] for kind in kinds)) for area, count in sorted(areas.items())]
    yield from table(("subsystem", *kinds), rows)
    yield ""
    if diff.modules:
        yield from ("Modules that moved:", "")
        yield from (f"- `{old}` to `{new}`" for old, new in diff.modules.items())
        yield ""


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _classification(audit: planning.Audit) -> Iterator[str]:
    yield from ("## Every symbol the 0.26 plugin touched", "")
    yield f"{planning.grades(audit.touched)}. The rules behind the letters stand at the end."
    yield ""
    rows = [
        (f.use.id, code(str(f.use.symbol)), f.use.use.value, change(f), f.verdict.grade.name, reasons(f))
        for f in audit.touched
    ]
    yield from table(("entry", "symbol", "used by", "change", "class", "reasons"), rows)
    yield ""


def _dispositions(audit: planning.Audit) -> Iterator[str]:
    yield from ("## Patch audit: what becomes of each entry", "")
    uses = {f.use.id: f.use for f in audit.touched}
    rows = [
        (
            use.id,
            use.use.value,
            use.lane,
            use.invariant,
            use.disposition.value if use.disposition else "",
            use.now,
        )
        for use in uses.values()
    ]
    yield from table(("entry", "used by", "lane", "it was for", "disposition", "now"), rows)
    yield ""


def _our_seams(audit: planning.Audit) -> Iterator[str]:
    yield from ("## This project's seams across the same difference", "")
    yield (
        f"{len(audit.ours)} uses in {len({f.use.id for f in audit.ours})} registered entries: "
        f"{planning.grades(audit.ours)}. They were written against the target, so this says where the ground under "
        "them moved lately. With no revision before the upgrade nothing of ours has to be adapted; what is not graver "
        "than MECHANICAL is left out."
    )
    yield ""
    rows = [
        (f.use.id, code(str(f.use.symbol)), f.use.use.value, change(f), f.verdict.grade.name, reasons(f))
        for f in audit.ours
        if f.verdict.grade > Grade.MECHANICAL
    ]
    yield from table(("seam", "symbol", "use", "change", "class", "reasons"), rows)
    yield ""


def _gate(audit: planning.Audit) -> Iterator[str]:
    yield from ("## Architecture gate", "")
    rows = [
        (
            check.name,
            check.condition,
            check.outcome.value,
            check.seen,
            ", ".join(f"[{name}](decisions/{name}.toml)" for name in check.decisions),
        )
        for check in audit.checks
    ]
    yield from table(("check", "stops when", "outcome", "seen", "decision"), rows)
    yield ""


def _plan(audit: planning.Audit) -> Iterator[str]:
    if not audit.stages:
        return
    yield from ("## Staged plan and impact matrix", "")
    yield "Dispositions of what the 0.26 plugin touched are recorded judgements; for our own seams they are proposals."
    yield ""
    header = (
        "entry",
        "class",
        "upstream cause",
        "our files",
        "invariant",
        "disposition",
        "how",
        "tests",
        "risk",
    )
    for number, stage in enumerate(audit.stages, start=1):
        yield from (f"### {number}. {stage.name}", "")
        rows = [
            (
                row.id,
                row.grade.name,
                "; ".join(row.cause),
                ", ".join(code(f) for f in row.files) or "none",
                row.invariant,
                row.disposition.value if row.disposition else "",
                row.now,
                ", ".join(code(t.split("::")[-1]) for t in row.tests[:3]) or "none",
                row.risk,
            )
            for row in stage.rows
        ]
        yield from table(header, rows)
        yield ""


def _closing(audit: planning.Audit) -> Iterator[str]:
    yield from ("## Evidence gaps", "")
    npu = sorted({f.use.id for f in audit.touched if f.use.lane == "npu"})
    yield f"- Out of scope (NPU lane of the 0.26 plugin), listed for completeness: {', '.join(npu)}."
    yield f"- {sum(item.proof == UNKNOWN for item in audit.items)} inventory items are UNKNOWN: no ledger was read."
    for check in audit.checks:
        if check.outcome is Outcome.UNKNOWN:
            yield f"- {check.name}: {check.seen}."
    yield "- Private functions of torch that the 0.26 plugin called are outside the compared trees."
    yield "- Callers are matched by name, in files that know the symbol's class or module."
    yield from ("", "## Proposed lessons", "")
    for finding in _lessons(audit):
        yield f"- `{finding.use.symbol.qualname}` ({finding.use.use.value}): {finding.verdict.reasons[0]}"
    yield from ("", "## Rules", "")
    yield from (f"- {name} ({_grade(name)}): {text}." for name, text in RULES.items())


def _lessons(audit: planning.Audit) -> list[Assessment]:
    """What would have hurt most: architectural findings, and arguments that shift silently."""
    return [
        f
        for f in audit.touched
        if f.verdict.grade is Grade.ARCHITECTURAL or any("by position" in r for r in f.verdict.reasons)
    ]


def _grade(rule: str) -> str:
    return {"A": "ARCHITECTURAL", "B": "BEHAVIORAL", "M": "MECHANICAL"}[rule[0]]
