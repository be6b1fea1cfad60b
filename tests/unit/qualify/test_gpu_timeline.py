# SPDX-License-Identifier: Apache-2.0
"""What the timeline keeps of a profile, and what the driver says of memory, from files and programs made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qualify.gpu import clients, timeline
from qualify.gpu.timeline import MOE_LAYERS, STEPS


def event(name: str, start: float, length: float, stream: int = 7) -> dict[str, object]:
    return {
        "ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": {"stream": stream}
    }  # fmt: skip


def traces(folder: Path, layers: int) -> list[Path]:
    """Both roles' traces of so many layers of 40 us."""
    attention, ffn = [event("attention", 0, 5)], []
    for at in range(100, 100 + 40 * layers, 40):
        attention += [
            event("push_kernel", at, 2),
            event("wait_kernel", at + 3, 25),
            event("norm", at + 30, 5),
        ]
        ffn += [
            event("wait_kernel", at - 5, 8),
            event("experts", at + 5, 15, 9),
            event("push_kernel", at + 22, 2),
        ]
    paths = {"rank0.pt.trace.json": attention, "ffn-0.pt.trace.json": ffn, "async_llm.json": []}
    for name, events in paths.items():
        (folder / name).write_text(json.dumps({"traceEvents": events}))
    return sorted(folder.glob("*.json"))


def test_two_decode_steps_of_both_roles_are_kept_with_their_streams(tmp_path: Path) -> None:
    decode_steps = STEPS[1]
    row, kept = timeline.analysed(traces(tmp_path, MOE_LAYERS * decode_steps), is_native=False)
    assert row["layers"] == MOE_LAYERS * (decode_steps - 2)
    assert row["parts_us"]["whole"]["median"] == 35.0
    experts = [entry for entry in kept["ffn"] if entry[0] == "experts"]
    assert len(experts) == 2 * MOE_LAYERS
    assert {stream for _, stream, _, _ in experts} == {9}
    assert kept["attention"][0][2] == 0.0


def test_a_profile_without_a_whole_layer_is_no_timeline_but_is_kept(tmp_path: Path) -> None:
    row, kept = timeline.analysed(traces(tmp_path, 0), is_native=False)
    assert "whole" not in str(row)
    assert kept == {"attention": [["attention", 7, 0.0, 5.0]], "ffn": []}


def test_natively_the_end_of_the_trace_is_kept(tmp_path: Path) -> None:
    early, late = event("first", 0, 5), event("last", 2 * timeline.NATIVE_TAIL_US, 5)
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [early, late]}))
    row, kept = timeline.analysed([tmp_path / "rank0.json"], is_native=True)
    assert row["kernels"] == 2
    assert [entry[0] for entry in kept["native"]] == ["last"]


def test_memory_is_told_by_process_and_unknown_figures_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '11, 500\\n12, [N/A]\\n11, 20\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert clients.memory_by_process() == {11: 520}


def test_a_file_that_never_comes_ends_the_wait(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="quiet did not come to be within 0 s"):
        clients.await_file(tmp_path / "quiet", 0.0)
    (tmp_path / "quiet").touch()
    clients.await_file(tmp_path / "quiet", 0.0)
