# SPDX-License-Identifier: Apache-2.0
"""ARCHITECTURE_GATE: the workflow's stop conditions as checks over identity, verdicts and our own sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from qualify.audit.symbols import belongs
from qualify.upgrade.assess import Assessment
from qualify.upgrade.decisions import Decision, covering
from qualify.upgrade.rules import Grade
from qualify.upgrade.trees import UNKNOWN, Identity

SUBSYSTEMS = {
    "engine": ("vllm.v1.engine", "vllm.v1.core", "vllm.v1.executor", "vllm.entrypoints"),
    "worker": ("vllm.v1.worker", "vllm.v1.outputs"),
    "model": ("vllm.model_executor", "vllm.models"),
    "distributed": ("vllm.distributed",),
    "graph and microbatches": ("vllm.compilation", "vllm.forward_context"),
    "configuration": ("vllm.config", "vllm.engine", "vllm.platforms", "vllm.plugins"),
}


class Outcome(str, Enum):
    """What a stop condition came to."""

    CLEAR = "CLEAR"
    STOP = "STOP"
    DECIDED = "DECIDED"
    """It holds, and a recorded decision answers every finding that it rests on."""
    UNKNOWN = "UNKNOWN"
    """Cannot be told without hardware; allowed in a planning audit, in nothing later."""


@dataclass(frozen=True)
class Check:
    """One stop condition."""

    name: str
    condition: str
    outcome: Outcome
    seen: str
    decisions: tuple[str, ...] = ()


@dataclass(frozen=True)
class OwnSources:
    """What was counted in our sources: each would be a broad or hidden compatibility layer."""

    patches: int
    copies: int
    probes: int


@dataclass(frozen=True)
class Material:
    """Everything the checks look at. `cells` maps a cell's name to the torch version it pins."""

    subject: str
    target: Identity
    findings: tuple[Assessment, ...]
    own: OwnSources
    cells: dict[str, str]
    decisions: tuple[Decision, ...]


def subsystem(module: str) -> str:
    """The part of vLLM that a module belongs to."""
    for name, prefixes in SUBSYSTEMS.items():
        if any(belongs(module, prefix) for prefix in prefixes):
            return name
    return "other"


def run(material: Material) -> tuple[Check, ...]:
    """All stop conditions, in the workflow's order."""
    return tuple(check(material) for check in CHECKS)


def stops(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The conditions that stop the upgrade."""
    return tuple(check for check in checks if check.outcome is Outcome.STOP)


def _from_findings(name: str, condition: str, found: Sequence[Assessment], material: Material) -> Check:
    if not found:
        return Check(name, condition, Outcome.CLEAR, "no finding")
    ids = sorted({f.use.id for f in found})
    answers = {i: covering(material.decisions, material.subject, i) for i in ids}
    open_ = [i for i, decision in answers.items() if decision is None]
    seen = ", ".join(f"{i} ({f})" for i, f in ((i, _symbols(found, i)) for i in ids))
    names = tuple(sorted({d.name for d in answers.values() if d is not None}))
    if open_:
        return Check(name, condition, Outcome.STOP, f"{seen}; undecided: {', '.join(open_)}", names)
    return Check(name, condition, Outcome.DECIDED, seen, names)


def _symbols(found: Iterable[Assessment], id_: str) -> str:
    return ", ".join(dict.fromkeys(f"`{f.use.symbol.qualname}`" for f in found if f.use.id == id_))


def _architectural(material: Material) -> list[Assessment]:
    return [f for f in material.findings if f.verdict.grade is Grade.ARCHITECTURAL]


def _has(finding: Assessment, *rules: str) -> bool:
    return any(reason.split(":")[0] in rules for reason in finding.verdict.reasons)


def _target(material: Material) -> Check:
    condition = (
        "the target revision and its CUDA, PyTorch and toolchain tuple are no reproducible environment"
    )
    target = material.target
    missing = [n for n in ("version", "commit", "sha256") if vars(target)[n] == UNKNOWN]
    torch = target.requires.get("torch", "")
    if not re.fullmatch(r"==\d[\w.+]*", torch):
        missing.append("an exact torch pin")
    if missing:
        return Check("reproducible-target", condition, Outcome.STOP, f"not stated: {', '.join(missing)}")
    seen = f"vLLM {target.version}, commit {target.commit}, torch {torch}, artifact {target.sha256[:16]}"
    return Check("reproducible-target", condition, Outcome.CLEAR, seen)


def _generation(material: Material) -> Check:
    condition = "a worker or model-runner generation, or who owns its life cycle, was replaced"
    found = [f for f in _architectural(material) if subsystem(f.use.symbol.module) in ("worker", "engine")]
    return _from_findings("runner-generation", condition, found, material)


def _seam(material: Material) -> Check:
    condition = "a required seam disappeared without an equivalent, or cannot be told"
    found = [f for f in material.findings if _has(f, "A0", "A1", "A3")]
    return _from_findings("seam-disappeared", condition, found, material)


def _feature(material: Material) -> Check:
    condition = "upstream removed or disabled a contract that a supported feature needs"
    found = [f for f in material.findings if _has(f, "A4")]
    found += [
        f
        for f in material.findings
        if _has(f, "B1", "B8") and subsystem(f.use.symbol.module) == "configuration"
    ]
    return _from_findings("feature-removed", condition, found, material)


def _mapping(material: Material) -> Check:
    condition = "contracts change across several subsystems without a one-to-one mapping of the invariants"
    found = _architectural(material)
    areas = {subsystem(f.use.symbol.module) for f in found}
    if len(areas) < 2:
        seen = f"architectural findings in {', '.join(areas) or 'no subsystem'}"
        return Check("cross-subsystem", condition, Outcome.CLEAR, seen)
    return _from_findings("cross-subsystem", condition, found, material)


def _layer(material: Material) -> Check:
    condition = (
        "preserving behaviour needs a new protocol, copies of upstream, reflection or a hidden fallback"
    )
    own = material.own
    seen = f"{own.patches} patches, {own.copies} copied functions, {own.probes} probing attribute reads"
    outcome = Outcome.STOP if own.patches or own.copies or own.probes else Outcome.CLEAR
    return Check("broad-compatibility", condition, outcome, seen)


def _cell(material: Material) -> Check:
    condition = "native artifacts, CUDA runtime, C++ ABI and compute capability cannot form one target cell"
    pin = material.target.requires.get("torch", "").removeprefix("==")
    fitting = sorted(
        name for name, torch in material.cells.items() if torch.split("+")[0] == pin.split("+")[0]
    )
    if not material.cells:
        return Check("one-cell", condition, Outcome.UNKNOWN, "no cell is described")
    if not fitting:
        wanted = ", ".join(f"{n}: {t}" for n, t in sorted(material.cells.items()))
        return Check("one-cell", condition, Outcome.STOP, f"no cell has torch {pin} ({wanted})")
    return Check(
        "one-cell",
        condition,
        Outcome.UNKNOWN,
        f"torch {pin} is the pin of {', '.join(fitting)}; driver, devices and ABI show only where they are",
    )


def _toolchain(material: Material) -> Check:
    condition = "the CUDA, driver, compiler and NCCL transition cannot be built and tested as one environment"
    return Check(
        "toolchain", condition, Outcome.UNKNOWN, "needs the target's hardware; no planning audit has it"
    )


CHECKS: tuple[Callable[[Material], Check], ...] = (
    _target, _generation, _seam, _feature, _mapping, _layer, _cell, _toolchain,
)  # fmt: skip
