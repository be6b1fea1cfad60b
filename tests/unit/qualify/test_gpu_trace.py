# SPDX-License-Identifier: Apache-2.0
"""The timeline's arithmetic, on traces made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from qualify.gpu import trace


def event(name: str, start: float, length: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


def step(at: float) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """One layer: attention from `at`, the FFN in between; 30 us from attention's last kernel to its next."""
    attention = [
        event("attention", at - 10, 10),
        event("afd::push_kernel<true>", at + 1, 2),
        event("afd::wait_kernel", at + 4, 25),
        event("next", at + 30, 5),
    ]
    ffn = [
        event("afd::wait_kernel", at - 8, 12),
        event("gate", at + 5, 4),
        event("experts", at + 11, 12),
        event("afd::push_kernel<true>", at + 25, 2),
    ]
    return attention, ffn


def test_the_parts_of_a_layer_follow_each_other_and_sum_to_the_whole() -> None:
    attention, ffn = step(100.0)
    (layer,) = trace.layers(trace.kernels(attention), trace.kernels(ffn))
    parts = {name: row["median"] for name, row in trace.breakdown([layer]).items()}
    assert parts == {
        "launch_push": 1, "request_seen": 3, "launch_ffn": 1, "ffn": 20, "answer_seen": 4, "launch_next": 1,
        "ffn_kernels": 2, "ffn_busy": 16, "ffn_gaps": 4, "whole": 30,
    }  # fmt: skip
    chain = ("launch_push", "request_seen", "launch_ffn", "ffn", "answer_seen", "launch_next")
    assert sum(parts[name] for name in chain) == parts["whole"]


def test_layers_are_paired_in_order_and_a_cut_one_is_left_out() -> None:
    steps = [step(100.0), step(200.0), step(300.0)]
    attention = [one for of_step, _ in steps for one in of_step][:-2]  # the last wait was not recorded
    ffn = [one for _, of_step in steps for one in of_step]
    found = trace.layers(trace.kernels(attention), trace.kernels(ffn))
    assert [layer.ffn_push.start for layer in found] == [125.0, 225.0]


def test_a_wait_that_ended_before_a_push_belongs_to_an_earlier_one() -> None:
    attention, ffn = step(200.0)
    stale = [event("afd::wait_kernel", 20, 5), event("afd::push_kernel<true>", 30, 2)]
    (layer,) = trace.layers(trace.kernels(attention), trace.kernels([*stale, *ffn]))
    assert layer.ffn_wait.start == 192.0


def test_only_the_gpu_s_work_counts_and_packed_traces_are_read(tmp_path: Path) -> None:
    attention, _ = step(100.0)
    events = [*attention, event("aten::add", 0, 500, "cpu_op"), {"ph": "M", "name": "process_name"}]
    path = tmp_path / "rank0.pt.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert len(trace.load(path)) == 4


def test_time_by_name_is_per_layer() -> None:
    pairs = [step(100.0), step(200.0)]
    attention = [one for of_step, _ in pairs for one in of_step]
    ffn = [one for _, of_step in pairs for one in of_step]
    table = trace.by_name(trace.layers(trace.kernels(attention), trace.kernels(ffn)))
    assert list(table) == ["experts", "gate"]
    assert table["experts"] == {"per_layer": 1.0, "us_per_layer": pytest.approx(12.0)}
