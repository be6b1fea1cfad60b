# SPDX-License-Identifier: Apache-2.0
"""The planning audit: identity, inventory, difference, gate and plan in order. It writes nothing.

What it returns is the report's material. When a phase blocks or stops, nothing of a later phase is computed, so
that no hypothesis can stand in for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from afd_plugin.seams.schema import Registry
from qualify.audit import copies, patches
from qualify.audit.sources import Package
from qualify.audit.upstream import Upstream
from qualify.lint import code
from qualify.lint.findings import Finding, without_allowed
from qualify.phases import Mode, Phase, PhaseRecord, Status, Workflow
from qualify.upgrade import changes, freeze, gate, inventory, plan, toml
from qualify.upgrade.assess import Assessment, Comparison, assess
from qualify.upgrade.decisions import Decision
from qualify.upgrade.dependencies import Dependency, seams
from qualify.upgrade.rules import Grade
from qualify.upgrade.trees import Tree

_OWN_LIMIT_S = 600.0


@dataclass
class Audit:
    """Everything the report says. Fields of phases that did not run stay empty."""

    frozen: freeze.Frozen
    workflow: Workflow
    items: tuple[inventory.Item, ...] = ()
    diff: changes.TreeDiff | None = None
    touched: tuple[Assessment, ...] = ()
    ours: tuple[Assessment, ...] = ()
    checks: tuple[gate.Check, ...] = ()
    stages: tuple[plan.Stage, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    own: Future[gate.OwnSources] | None = None

    @property
    def subject(self) -> str:
        """`CURRENT to TARGET`."""
        return f"{self.frozen.current.version} to {self.frozen.target.version}"


@dataclass(frozen=True)
class Request:
    """What the audit is asked: the trees, this checkout, and the data it goes by."""

    root: Path
    package: str
    current: Tree
    target: Tree
    task: freeze.Task
    decisions: tuple[Decision, ...]
    touched: tuple[Dependency, ...]
    registry: Registry


def run(request: Request) -> Audit:
    """Phases 0 to 4; the rest is recorded as skipped."""
    here = freeze.checkout(request.root)
    frozen = freeze.freeze(
        request.current.identity, request.target.identity, here, request.task, request.decisions
    )
    audit = Audit(frozen, Workflow(Mode.PLANNING_AUDIT).after(_identity_record(frozen)))
    if audit.workflow.stopped_by is None:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            # reading all of vLLM for copied functions takes as long as the rest: it runs beside it
            target = request.target.upstream.root("vllm")
            audit.own = pool.submit(own_sources, request.root, request.package, target)
            for phase in (_inventory, _difference, _gate, _plan):
                started = time.monotonic()
                record = phase(request, audit)
                audit.seconds[record.phase.value] = round(time.monotonic() - started, 1)
                audit.workflow = audit.workflow.after(record)
                if audit.workflow.stopped_by is not None:
                    break
    audit.workflow = audit.workflow.finished()
    return audit


def _identity_record(frozen: freeze.Frozen) -> PhaseRecord:
    evidence = tuple(
        f"{role} vLLM {i.version}: commit {i.commit}, {i.source} {i.name}, sha256 {i.sha256}"
        for role, i in (("current", frozen.current), ("target", frozen.target))
    )
    evidence += tuple(f"decision {c.decision.name}" for c in frozen.conflicts if c.decision)
    if frozen.blockers:
        return PhaseRecord(
            Phase.FREEZE_IDENTITY,
            Status.BLOCKED,
            evidence,
            "; ".join(frozen.blockers),
            "resolve the blockers as the blocker plan says, then run the planning audit again",
        )
    return PhaseRecord(Phase.FREEZE_IDENTITY, Status.PASS, evidence, "", "take the inventory")


def _inventory(request: Request, audit: Audit) -> PhaseRecord:
    package = Package(request.root, request.package)
    audit.items = inventory.take(request.root, package, request.target.upstream, request.registry)
    counts = inventory.unknown(audit.items)
    evidence = tuple(
        f"{area}: {total} found, {open_} UNKNOWN" for area, (total, open_) in sorted(counts.items())
    )
    if not counts.get("seam"):
        blocker = "the source search found no use of vLLM: it did not look at this project"
        return PhaseRecord(
            Phase.INVENTORY_AFD_CONTRACTS,
            Status.BLOCKED,
            evidence,
            blocker,
            "run it in the project's checkout",
        )
    return PhaseRecord(Phase.INVENTORY_AFD_CONTRACTS, Status.PASS, evidence, "", "compare the two trees")


def _difference(request: Request, audit: Audit) -> PhaseRecord:
    audit.diff = changes.diff(request.current, request.target)
    trees = Comparison(request.current, request.target, audit.diff)
    own = [use for use in seams(request.registry) if use.symbol.upstream]
    findings = assess((*request.touched, *own), trees)
    audit.touched, audit.ours = findings[: len(request.touched)], findings[len(request.touched) :]
    counts = ", ".join(f"{number} {kind}" for kind, number in audit.diff.counts().items())
    return PhaseRecord(
        Phase.DIFF_VLLM,
        Status.PASS,
        (f"symbols: {counts}", *(f"{name}: {grades(found)}" for name, found in _halves(audit))),
        "",
        "judge the stop conditions",
    )


def _halves(audit: Audit) -> tuple[tuple[str, Sequence[Assessment]], ...]:
    return (("what the 0.26 plugin touched", audit.touched), ("our seams", audit.ours))


def grades(findings: Sequence[Assessment]) -> str:
    """How many findings have each grade."""
    return ", ".join(f"{sum(f.verdict.grade is g for f in findings)} {g.name}" for g in reversed(Grade))


def _gate(request: Request, audit: Audit) -> PhaseRecord:
    if audit.own is None:
        raise RuntimeError("the gate runs after the identity phase, which starts the scan of our own sources")
    material = gate.Material(
        audit.subject,
        request.target.identity,
        at_stake(request, audit),
        audit.own.result(timeout=_OWN_LIMIT_S),
        _cells(request.root),
        request.decisions,
    )
    audit.checks = gate.run(material)
    evidence = tuple(f"{check.name}: {check.outcome.value}" for check in audit.checks)
    stopped = gate.stops(audit.checks)
    if stopped:
        blocker = "; ".join(f"{check.name}: {check.seen}" for check in stopped)
        return PhaseRecord(
            Phase.ARCHITECTURE_GATE,
            Status.STOPPED,
            evidence,
            blocker,
            "record a decision that covers the findings under docs/upgrades/decisions, or give the upgrade up",
        )
    return PhaseRecord(Phase.ARCHITECTURE_GATE, Status.PASS, evidence, "", "write the staged plan")


def at_stake(request: Request, audit: Audit) -> tuple[Assessment, ...]:
    """The findings that an upgrade must answer.

    With a revision before the upgrade these are all uses of ours that exist in the current tree. Without one our
    seams are written against the target, so only one that the target does not have is at stake.
    """
    new = request.task.base == "none"
    ours = [f for f in audit.ours if f.evidence.new is None or not (new or f.evidence.old is None)]
    return (*audit.touched, *ours)


def own_sources(root: Path, name: str, vllm_root: Path) -> gate.OwnSources:
    """Patches, copied functions and probing reads in our package, counted by the checks of the audit and the lint."""
    package = Package(root, name)
    found = [f for f in patches.uses(package, Upstream({"vllm": vllm_root})) if isinstance(f, Finding)]
    copied = list(copies.check(package, vllm_root))
    probes = 0
    for source in package:
        raw = code.probing(source.path, source.module.tree)
        probes += sum(f.rule == "probing" for f in without_allowed(source.path, source.text, raw))
    return gate.OwnSources(len(found), len(copied), probes)


def _cells(root: Path) -> dict[str, str]:
    path = root / "containers" / "cells.toml"
    if not path.is_file():
        return {}
    return {name: str(cell["torch"]) for name, cell in toml.read(path).items() if "torch" in cell}


def _plan(request: Request, audit: Audit) -> PhaseRecord:
    audit.stages = plan.stages(at_stake(request, audit))
    rows = sum(len(stage.rows) for stage in audit.stages)
    return PhaseRecord(
        Phase.PRODUCE_STAGED_PLAN,
        Status.PASS,
        (f"{len(audit.stages)} stages, {rows} entries", f"{len(request.decisions)} recorded decisions"),
        "",
        "review the plan; implementation is another mode",
    )
