# SPDX-License-Identifier: Apache-2.0
"""Where a decode step's time goes: vLLM's own profiler in both roles while graphs replay, and in a native engine.

The setting `switches` names levers of :mod:`qualify.gpu.switches` to compare with the plain run; each is a pair of its
own. What counts is a layer, so the model has half of DeepSeek-V2-Lite's, and a GPU holds native and four pairs. The
kernels of two decode steps of each engine are kept as `kernels-ENGINE-BATCH.json` in the folder of the logs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from qualify.gpu import trace
from qualify.gpu.engines import Engine, native, pair, wait_all
from qualify.gpu.host import START_S, Host
from qualify.gpu.speed import arguments, shape_folder, summary
from qualify.gpu.switches import Switch, chosen
from qualify.gpu.workloads import V2_LITE, bench_prompts

STEPS = (4, 12)
LAYERS = 14
MOE_LAYERS = LAYERS - V2_LITE["first_k_dense_replace"]
BATCHES = (1, 32)
LENGTHS = (16, 144)
REPEATS = 3
TRACE_S = 30.0
"""Until the FFN has written its trace."""

NATIVE_TAIL_US = 12_000.0
"""Of a native trace; at least two steps at batch 32."""


def profiler(folder: Path) -> dict[str, Any]:
    """vLLM's profiler configuration; stacks would cost more than the step."""
    return {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False}


@dataclass(frozen=True)
class Profiled:
    """An engine whose profiler writes to `traces`."""

    name: str
    engine: Engine
    traces: Path


def timeline(host: Host) -> dict[str, Any]:
    """Per batch: the parts of a layer for AFD (and for each switch), the same kernels' time natively, and TPOT."""
    batches = host.setting("batches", list(BATCHES))
    prompts = {batch: bench_prompts(batch, 0, V2_LITE["vocab_size"] - 10000) for batch in batches}
    profiled: list[Profiled] = []
    try:
        for one in _engines(host, batches):
            profiled.append(one)
        wait_all([one.engine for one in profiled], max(1.0, min(START_S, host.left())))
        tpot = _tpot(profiled, prompts)
        outcome: dict[str, Any] = {
            str(batch): {one.name: _profile(one, batch, asked, host.logs) for one in profiled}
            for batch, asked in prompts.items()
        }
        codes = [one.engine.close() for one in profiled]
    except BaseException:
        for one in profiled:
            one.engine.close(graceful=False)
        raise
    return {
        "layers": LAYERS,
        "tpot_ms": tpot,
        "batches": outcome,
        "exit_codes": codes,
        "passed": all("whole" in str(row) for row in outcome.values()),
    }


def _engines(host: Host, batches: Sequence[int]) -> Iterator[Profiled]:
    folder = shape_folder(host.logs, LAYERS)
    graph = {**arguments(batches), "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.12}
    switches = {"plain": Switch("as it is"), **chosen(host.setting("switches", ["shared-on-attention"]))}
    for name in ("native", *switches):
        traces = host.logs / f"trace-{name}"
        traces.mkdir(exist_ok=True)
        configured, label = {**graph, "profiler_config": profiler(traces)}, f"timeline-{name}"
        if name == "native":
            yield Profiled(name, native(label, folder, configured, host.logs), traces)
            continue
        switch = switches[name]
        yield Profiled(
            name,
            pair(label, folder, configured, host.logs, environment=switch.environment, **switch.options),
            traces,
        )


def _tpot(profiled: Sequence[Profiled], prompts: Mapping[int, Any]) -> dict[str, Any]:
    """Milliseconds per token without the profiler; engines take turns."""
    measured: dict[str, dict[str, list[float]]] = {
        one.name: {str(batch): [] for batch in prompts} for one in profiled
    }
    for repeat in range(-1, REPEATS):
        for batch, asked in prompts.items():
            for one in profiled if repeat % 2 else profiled[::-1]:
                lengths = LENGTHS if repeat >= 0 else STEPS
                result = one.engine.ask(120, "time", prompts=asked, lengths=list(lengths))
                if repeat >= 0:
                    measured[one.name][str(batch)].append(result["tpot_ms"])
    return {name: {batch: summary(values) for batch, values in by.items()} for name, by in measured.items()}


def _profile(one: Profiled, batch: int, prompts: Any, logs: Path) -> dict[str, Any]:
    seen = set(one.traces.glob("*.json*"))
    one.engine.ask(180, "profile", prompts=prompts, lengths=list(STEPS))
    row, kept = analysed(_written(one, seen), one.name == "native")
    (logs / f"kernels-{one.name}-{batch}.json").write_text(json.dumps(kept), encoding="utf-8")
    return row


def _written(one: Profiled, seen: set[Path]) -> list[Path]:
    """The traces of a profile that is over; the FFN writes its own after attention has answered."""
    deadline = time.monotonic() + TRACE_S
    while True:
        new = sorted(set(one.traces.glob("*.json*")) - seen)
        sizes = [path.stat().st_size for path in new]
        time.sleep(1.0)
        whole = all(sizes) and sizes == [path.stat().st_size for path in new]
        if whole and (one.name == "native" or any(path.name.startswith("ffn") for path in new)):
            return new
        if time.monotonic() > deadline:
            return new


def analysed(paths: Sequence[Path], is_native: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of the traces that one profile wrote, and two steps' kernels; the FFN's traces are named after it."""
    files = [path for path in paths if "async_llm" not in path.name]
    if is_native:
        native_kernels = [kernel for path in files for kernel in trace.load(path)]
        end = native_kernels[-1].end if native_kernels else 0.0
        kept = {"native": trace.excerpt(native_kernels, end - NATIVE_TAIL_US, end)}
        return {"kernels": len(native_kernels), "us_by_name": _largest(native_kernels)}, kept
    ffn = [kernel for path in files if path.name.startswith("ffn") for kernel in trace.load(path)]
    attention = [kernel for path in files if not path.name.startswith("ffn") for kernel in trace.load(path)]
    found = trace.layers(attention, ffn)
    # the last steps are decode steps of one size; a layer of a prefill would be another story
    decode = found[-MOE_LAYERS * (STEPS[1] - 2) :]
    row: dict[str, Any] = {
        "attention_kernels": len(attention),
        "ffn_kernels": len(ffn),
        "layers": len(decode),
    }
    if not decode:  # whatever there is, to see why
        return row, {
            role: trace.excerpt(kernels[-2000:], 0.0, inf)
            for role, kernels in (("attention", attention), ("ffn", ffn))
        }
    start, end = decode[-2 * MOE_LAYERS :][0].before.start, decode[-1].next_kernel.end
    kept = {"attention": trace.excerpt(attention, start, end), "ffn": trace.excerpt(ffn, start, end)}
    return {**row, "parts_us": trace.breakdown(decode), "ffn_by_name": trace.by_name(decode)}, kept


def _largest(found: Sequence[trace.Kernel], count: int = 40) -> dict[str, dict[str, float]]:
    total: dict[str, list[float]] = {}
    for kernel in found:
        total.setdefault(kernel.name[:80], []).append(kernel.duration)
    largest = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return {name: {"count": len(values), "us": round(sum(values), 1)} for name, values in largest}
