# SPDX-License-Identifier: Apache-2.0
"""Ranges for profilers: both roles name a step alike, and nothing is written unless somebody looks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from afd_plugin.plan import Exchange, StepKind, StepPlan
from afd_plugin.v1.worker.ranges import Ranges

PLAN = StepPlan(7, StepKind.REAL, ((4,),))


def written(ranges: Ranges, path: Path) -> list[str]:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        ranges.step(PLAN),
        ranges.exchange(Exchange(7, 2, 1), "model.layers.2.mlp.experts"),
    ):
        torch.ones(2).sum()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if str(event.get("name", "")).startswith("afd ")]


def test_a_profile_holds_a_range_for_the_step_and_for_each_unit_and_stage(tmp_path: Path) -> None:
    ranges = Ranges(on=False)
    ranges.profiling(True)
    names = written(ranges, tmp_path / "trace.json")
    assert set(names) == {"afd step 7 real", "afd step 7 model.layers.2.mlp.experts stage 1"}


def test_nothing_is_written_before_a_profile_and_after_it(tmp_path: Path) -> None:
    ranges = Ranges(on=False)
    assert written(ranges, tmp_path / "before.json") == []
    ranges.profiling(True)
    ranges.profiling(False)
    assert written(ranges, tmp_path / "after.json") == []


def test_a_tool_from_outside_gets_them_from_the_beginning_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFD_RANGES", "1")
    ranges = Ranges()
    assert ranges.on
    ranges.profiling(False)
    assert ranges.on
