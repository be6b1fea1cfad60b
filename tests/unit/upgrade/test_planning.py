# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import datetime
import hashlib
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from afd_plugin.seams.schema import Registry, Seam, SeamKind, Surface
from qualify.audit.symbols import Symbol
from qualify.phases import Phase, Status
from qualify.upgrade import freeze, gate, inventory, lookahead, plan, planning, report
from qualify.upgrade.assess import Comparison, assess
from qualify.upgrade.decisions import Decision, DecisionKind
from qualify.upgrade.dependencies import Dependency, Disposition, Use, seams, touched
from qualify.upgrade.rules import Grade
from qualify.upgrade.toml import RecordError
from qualify.upgrade.trees import UNKNOWN

SUBJECT = "0.26.0 to 0.28.0"
RUNNER = "vllm.v1.worker:Runner"
REGISTRY = Registry(
    (
        Seam(
            "choose", f"{RUNNER}.choose", SeamKind.OVERRIDE, "", "", "the caller passes tokens only", "none",
            ("plug.runner",), ("tests/t.py::t",), ("tests/n.py::n",),
        ),
    ),
    (Surface("helpers", "vllm.helpers:", {"spread": "", "vanish": ""}, "read as they stand", ("tests/t.py::t",)),),
)  # fmt: skip
TOUCHED = (
    Dependency(
        "engine", Symbol.parse("vllm.v1.engine:Core.__init__"), Use.COPY, "no scheduler", Disposition.REMOVE
    ),
    Dependency("steady", Symbol.parse(f"{RUNNER}.steady"), Use.OVERRIDE, "a step", Disposition.PORT),
)


def decided(*covers: str) -> Decision:
    day = datetime.date(2026, 1, 2)
    return Decision(
        "arch", DecisionKind.ARCHITECTURE, day, SUBJECT, "anew", "why", "so", "who", covers=frozenset(covers)
    )


@pytest.fixture
def request_for(trees: Comparison, project: Path) -> Callable[..., planning.Request]:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True, timeout=60)
    name = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "add", "."], cwd=project, check=True, timeout=60)
    subprocess.run(["git", *name, "commit", "-q", "-m", "one"], cwd=project, check=True, timeout=60)
    task = freeze.Task((), "", "told by the test")

    def make(
        *recorded: Decision, stated: tuple[freeze.Statement, ...] = (), base: str = "none"
    ) -> planning.Request:
        told = replace(task, statements=stated, base=base)
        return planning.Request(project, "plug", trees.old, trees.new, told, recorded, TOUCHED, REGISTRY)

    return make


def snapshot(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and ".git/" not in path.as_posix())
    return {path.as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_a_blocked_identity_yields_a_blocker_plan_and_nothing_else(
    request_for: Callable[..., planning.Request],
) -> None:
    audit = planning.run(request_for(stated=(freeze.Statement("0.26.0", "5" * 40, "a document"),)))
    assert [r.status for r in audit.workflow.records] == [Status.BLOCKED] + [Status.SKIPPED] * 12
    assert audit.diff is None
    assert not audit.stages
    text = report.render(audit, "command", "2026-01-02")
    assert "## Blocker plan" in text
    assert "ffd46bfab" in text
    assert "5" * 40 in text
    for heading in ("## Inventory", "## Difference", "## Architecture gate", "## Staged plan"):
        assert heading not in text


def test_an_undecided_architectural_finding_stops_the_gate_and_there_is_no_plan(
    request_for: Callable[..., planning.Request],
) -> None:
    audit = planning.run(request_for())
    (record,) = (r for r in audit.workflow.records if r.phase is Phase.ARCHITECTURE_GATE)
    assert record.status is Status.STOPPED
    assert "undecided: engine" in record.blocker
    assert not audit.stages


def test_a_decided_audit_reports_every_touched_symbol_and_writes_nothing(
    request_for: Callable[..., planning.Request], trees: Comparison
) -> None:
    request = request_for(decided("engine"))
    before = snapshot(request.root), snapshot(trees.old.root), snapshot(trees.new.root)
    audit = planning.run(request)
    text = report.render(audit, "command", "2026-01-02")
    assert (snapshot(request.root), snapshot(trees.old.root), snapshot(trees.new.root)) == before
    assert audit.workflow.readiness() == "planned"
    for use in TOUCHED:
        assert f"`{use.symbol}`" in text
    assert "| engine | ARCHITECTURAL | A2:" in text
    assert "| steady | override | all | a step | port | - |" in text
    assert "[arch](decisions/arch.toml)" in text
    assert {row.id for stage in audit.stages for row in stage.rows} == {"engine", "helpers"}


def test_with_a_revision_before_the_upgrade_every_use_of_ours_is_at_stake(
    request_for: Callable[..., planning.Request],
) -> None:
    audit = planning.run(request_for(decided("engine"), base="a" * 40))
    assert {row.id for stage in audit.stages for row in stage.rows} == {"engine", "choose", "helpers"}


def test_the_inventory_is_found_in_the_sources_and_nothing_is_proven(
    project: Path, trees: Comparison
) -> None:
    package = planning.Package(project, "plug")
    items = inventory.take(project, package, trees.new.upstream, REGISTRY)
    names = {(item.area, item.name) for item in items}
    assert ("feature", "Role.FFN") in names
    assert ("feature", "variable AFD_LISTEN") in names
    assert ("feature", "script plug") in names
    assert ("refusal", "ShapeRefused") in names
    assert ("claim", "It serves exactly one model.") in names
    assert ("seam", f"overrides {RUNNER}.choose") in names
    assert not any("never counted" in name for _, name in names)
    assert all(item.proof == UNKNOWN for item in items)
    proven = inventory.prove(items, {"Role.FFN": "record 1"})
    assert inventory.unknown(proven)["feature"][1] == inventory.unknown(items)["feature"][1] - 1


def test_a_seam_that_nobody_registered_is_said_to_be_so(project: Path, trees: Comparison) -> None:
    package = planning.Package(project, "plug")
    items = inventory.take(project, package, trees.new.upstream, Registry(()))
    assert all("not registered" in item.where for item in items if item.area == "seam")


def material(trees: Comparison, *decisions: Decision, **more: object) -> gate.Material:
    found = assess(TOUCHED, trees)
    own = gate.OwnSources(0, 0, 0)
    filled = gate.Material(SUBJECT, trees.new.identity, found, own, {"cpu": "2.13.0+cpu"}, decisions)
    return replace(filled, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "name", "outcome"),
    [
        ({}, "reproducible-target", gate.Outcome.CLEAR),
        ({}, "runner-generation", gate.Outcome.STOP),
        ({}, "seam-disappeared", gate.Outcome.CLEAR),
        ({}, "cross-subsystem", gate.Outcome.CLEAR),
        ({"own": gate.OwnSources(0, 1, 0)}, "broad-compatibility", gate.Outcome.STOP),
        ({}, "one-cell", gate.Outcome.UNKNOWN),
        ({"cells": {"cpu": "2.12.0"}}, "one-cell", gate.Outcome.STOP),
        ({"cells": {}}, "one-cell", gate.Outcome.UNKNOWN),
        ({}, "toolchain", gate.Outcome.UNKNOWN),
    ],
)
def test_each_stop_condition_stops_on_what_it_names(
    trees: Comparison, change: dict[str, object], name: str, outcome: gate.Outcome
) -> None:
    (check,) = (c for c in gate.run(material(trees, **change)) if c.name == name)
    assert check.outcome is outcome


def test_a_target_without_an_exact_torch_pin_is_no_environment(trees: Comparison) -> None:
    target = replace(trees.new.identity, requires={"torch": ">=2"})
    assert (
        gate.stops(gate.run(material(trees, decided("engine"), target=target)))[0].name
        == "reproducible-target"
    )


def test_a_decision_answers_only_what_it_covers(trees: Comparison) -> None:
    assert gate.stops(gate.run(material(trees, decided("engine")))) == ()
    assert gate.stops(gate.run(material(trees, decided("other"))))[0].name == "runner-generation"


def test_several_subsystems_need_a_decision_for_each_finding(trees: Comparison) -> None:
    moe = Dependency("moe", Symbol.parse("vllm.model_executor.gone:thing"), Use.COPY)
    found = assess((*TOUCHED, moe), trees)
    checks = {c.name: c for c in gate.run(material(trees, decided("engine"), findings=found))}
    assert checks["cross-subsystem"].outcome is gate.Outcome.STOP
    assert "undecided: moe" in checks["cross-subsystem"].seen


def test_the_plan_is_in_order_and_leaves_out_what_did_not_change(trees: Comparison) -> None:
    made = plan.stages(assess((*TOUCHED, *seams(REGISTRY)), trees))
    names = [name for name, _ in plan.STAGES]
    assert [names.index(stage.name) for stage in made] == sorted(names.index(stage.name) for stage in made)
    rows = {row.id: row for stage in made for row in stage.rows}
    assert "steady" not in rows
    assert rows["engine"].disposition is Disposition.REMOVE
    assert rows["choose"].disposition is Disposition.PORT
    assert rows["choose"].files == ("plug.runner",)


def test_a_newer_wheel_tells_which_seams_break_and_how(trees: Comparison) -> None:
    outlook = lookahead.look(trees.old, trees.new, REGISTRY)
    assert [f.use.symbol.name for f in outlook.of(Grade.BEHAVIORAL)] == ["choose", "vanish"]
    assert outlook.missing == ()
    text = lookahead.render(outlook)
    assert "B6: `Runner.execute: +allow`" in text
    assert "the caller passes tokens only" in text


def test_a_registry_for_another_tree_is_said_to_be_so(trees: Comparison) -> None:
    other = Registry((), (Surface("x", "vllm.helpers:", {"nothing": ""}, "invariant", ()),))
    outlook = lookahead.look(trees.old, trees.old, other)
    assert "Not in our own vLLM either: `vllm.helpers:nothing`" in lookahead.render(outlook)


def test_the_table_of_the_026_plugin_is_whole() -> None:
    table = touched()
    assert len(table) > 100
    assert all(use.disposition and use.now and use.invariant for use in table)
    assert all(use.held_as and use.holder for use in table if use.use is Use.STUB)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[[touch]]\nid = 'x'\n", "misses"),
        ("[[touch]]\nid='x'\nsymbols=['a:b']\nuse='hug'\npurpose='p'\ndisposition='port'\nnow='n'\n", "hug"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "touched.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=word):
        touched(path)


def test_trees_of_one_release_are_no_upgrade(
    request_for: Callable[..., planning.Request], trees: Comparison
) -> None:
    audit = planning.run(replace(request_for(), current=trees.new))
    assert "the same artifact" in audit.workflow.records[0].blocker
