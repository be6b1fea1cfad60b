# SPDX-License-Identifier: Apache-2.0
"""The committed report of the real upgrade against what a reader found by hand in both sources."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from qualify.upgrade.dependencies import touched

UPGRADES = Path(__file__).resolve().parents[3] / "docs" / "upgrades"
REPORT = UPGRADES / "0.26.0-to-0.28.0.md"
GRADES = ("UNCHANGED", "MECHANICAL", "BEHAVIORAL", "ARCHITECTURAL")

BY_HAND = {
    "engine-core-init": "ARCHITECTURAL",
    "engine-core-shutdown": "MECHANICAL",
    "engine-core-kv": "BEHAVIORAL",
    "engine-core-loop": "BEHAVIORAL",
    "create-engine-config": "BEHAVIORAL",
    "vllm-config-post-init": "BEHAVIORAL",
    "run-engine-core": "BEHAVIORAL",
    "launch-core-engines": "BEHAVIORAL",
    "add-request-async": "UNCHANGED",
    "set-forward-context": "UNCHANGED",
    "fused-moe-factory": "ARCHITECTURAL",
    "ubatch-wrapper-swap": "MECHANICAL",
    "worker": "MECHANICAL",
    "worker-init-device": "MECHANICAL",
    "worker-warm-up": "BEHAVIORAL",
    "lora-mixin": "MECHANICAL",
    "ubatch-wrapper": "UNCHANGED",
    "deepseek-classes": "ARCHITECTURAL",
    "moe-external-router": "ARCHITECTURAL",
    "runner-model-forward": "UNCHANGED",
    "runner-attention-metadata": "BEHAVIORAL",
    "runner-batch-execution": "BEHAVIORAL",
    "runner-dummy-run": "MECHANICAL",
    "runner-capture": "BEHAVIORAL",
    "runner-prepare-inputs": "BEHAVIORAL",
    "runner-bookkeeping": "BEHAVIORAL",
    "runner-load-model": "BEHAVIORAL",
    "runner-execute-model": "UNCHANGED",
    "runner-shutdown": "UNCHANGED",
    "runner-update-config": "MECHANICAL",
    "runner-profile-graphs": "BEHAVIORAL",
    "process-groups": "UNCHANGED",
}
"""The class by hand of each row that has one; a row of several symbols has the gravest."""

WITHOUT_CLASS = {"noop-scheduler", "model-runner", "helpers", "deepseek-names"}
"""Rows that the reader described without one word: a crash, a mixture, lists of names."""

EXPLAINED = {
    "engine-core-shutdown": "UNCHANGED",
    "ubatch-wrapper-swap": "UNCHANGED",
    "runner-execute-model": "BEHAVIORAL",
    "runner-profile-graphs": "UNCHANGED",
}
"""Where the rules differ, as explained in docs/upgrades/README.md."""

GONE_BY_HAND = {
    "DeepseekV2MoE.ep_rank",
    "DeepseekV2MoE.physical_expert_start",
    "DeepseekV2MoE.physical_expert_end",
    "MoERunner.is_internal_router",
    "prepare_communication_buffer_for_model",
}
RENAMED_BY_HAND = {"FusedMoE"}

Row = tuple[str, str, str, str]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """(entry, symbol, change, class) of the report's table."""
    text = REPORT.read_text(encoding="utf-8")
    section = text.split("## Every symbol the 0.26 plugin touched", 1)[1].split("\n## ", 1)[0]
    found = re.findall(
        r"^\| ([a-z0-9-]+) \| `([^`]+)` \| \S+ \| ([^|]+) \| ([A-Z]+) \|", section, re.MULTILINE
    )
    return [(entry, symbol, change.strip(), grade) for entry, symbol, change, grade in found]


def test_the_report_classifies_every_symbol_of_the_table(rows: list[Row]) -> None:
    assert [symbol for _, symbol, _, _ in rows] == [str(use.symbol) for use in touched()]


def test_the_rules_agree_with_the_reader_but_for_what_is_explained(rows: list[Row]) -> None:
    gravest: dict[str, str] = defaultdict(lambda: GRADES[0])
    for entry, _, _, grade in rows:
        gravest[entry] = max(gravest[entry], grade, key=GRADES.index)
    assert set(gravest) == set(BY_HAND) | WITHOUT_CLASS
    differing = {entry: gravest[entry] for entry, grade in BY_HAND.items() if gravest[entry] != grade}
    assert differing == EXPLAINED
    said = (UPGRADES / "README.md").read_text(encoding="utf-8")
    assert f"{len(BY_HAND) - len(EXPLAINED)} of {len(BY_HAND)}" in said
    for entry, grade in EXPLAINED.items():
        assert f"| `{entry}` | {BY_HAND[entry]} | {grade} |" in said


def test_the_same_names_are_gone_and_renamed(rows: list[Row]) -> None:
    names: dict[str, set[str]] = defaultdict(set)
    for _, symbol, change, _ in rows:
        names[change].add(symbol.partition(":")[2])
    assert names["gone"] == GONE_BY_HAND
    assert names["renamed"] == RENAMED_BY_HAND
    assert names["in neither tree"] == set()


def test_both_commits_stand_in_the_report(rows: list[Row]) -> None:
    text = REPORT.read_text(encoding="utf-8")
    assert "`ffd46bfab`" in text
    assert "`568afb3a13806beb53bb2e6bd518269357b237c0`" in text
    assert rows
