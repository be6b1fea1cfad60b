# SPDX-License-Identifier: Apache-2.0
"""Where a decode step's time goes: vLLM's own profiler in both roles while graphs replay, and in a native engine.

The setting `switches` names levers of :mod:`qualify.gpu.switches` to compare with the plain run; each is a pair of its
own, and one GPU holds the native engine and two pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qualify.gpu import trace
from qualify.gpu.engines import Engine, native, pair, wait_all
from qualify.gpu.host import START_S, Host
from qualify.gpu.speed import arguments, shape_folder
from qualify.gpu.switches import Switch, chosen
from qualify.gpu.workloads import V2_LITE, bench_prompts

STEPS = (4, 12)
MOE_LAYERS = V2_LITE["num_hidden_layers"] - V2_LITE["first_k_dense_replace"]
BATCHES = (1, 32)


def profiler(folder: Path) -> dict[str, Any]:
    """vLLM's profiler configuration; stacks would cost more than the step."""
    return {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False}


def timeline(host: Host) -> dict[str, Any]:
    """Per batch: the parts of a layer for AFD (and for each switch), and the same kernels' time natively."""
    folder, graph = shape_folder(host.logs), {**arguments(BATCHES), "kv_cache_memory_bytes": 2 << 30}
    switches = {"plain": Switch("as it is"), **chosen(host.setting("switches", ["shared-on-attention"]))}
    names = ["native", *switches]
    traces = {name: host.logs / f"trace-{name}" for name in names}
    for path in traces.values():
        path.mkdir(exist_ok=True)
    engines: list[Engine] = []
    try:
        engines.append(
            native(
                "timeline-native", folder, {**graph, "profiler_config": profiler(traces["native"])}, host.logs
            )
        )
        for name, switch in switches.items():
            configured = {**graph, "profiler_config": profiler(traces[name])}
            engines.append(
                pair(
                    f"timeline-{name}",
                    folder,
                    configured,
                    host.logs,
                    environment=switch.environment,
                    **switch.options,
                )
            )
        wait_all(engines, max(1.0, min(START_S, host.left())))
        outcome: dict[str, Any] = {}
        for batch in host.setting("batches", list(BATCHES)):
            prompts = bench_prompts(batch, 0, V2_LITE["vocab_size"] - 10000)
            rows: dict[str, Any] = {}
            for name, engine in zip(names, engines, strict=True):
                engine.ask(120, "time", prompts=prompts, lengths=list(STEPS))  # warm
                seen = set(traces[name].glob("*.json*"))
                engine.ask(180, "profile", prompts=prompts, lengths=list(STEPS))
                rows[name] = analysed(sorted(set(traces[name].glob("*.json*")) - seen), name == "native")
            outcome[str(batch)] = rows
        codes = [engine.close() for engine in engines]
    except BaseException:
        for engine in engines:
            engine.close(graceful=False)
        raise
    return {
        "batches": outcome,
        "exit_codes": codes,
        "passed": all("whole" in str(row) for row in outcome.values()),
    }


def analysed(paths: Sequence[Path], is_native: bool) -> dict[str, Any]:
    """The figures of the traces that one profile wrote; the FFN's are named after it."""
    files = [path for path in paths if "async_llm" not in path.name]
    if is_native:
        native_kernels = [kernel for path in files for kernel in trace.load(path)]
        return {"kernels": len(native_kernels), "us_by_name": _largest(native_kernels)}
    ffn = [kernel for path in files if path.name.startswith("ffn") for kernel in trace.load(path)]
    attention = [kernel for path in files if not path.name.startswith("ffn") for kernel in trace.load(path)]
    found = trace.layers(attention, ffn)
    # the last steps are decode steps of one size; a layer of a prefill would be another story
    decode = found[-MOE_LAYERS * (STEPS[1] - 2) :]
    if not decode:
        return {"attention_kernels": len(attention), "ffn_kernels": len(ffn), "layers": 0}
    return {
        "layers": len(decode),
        "parts_us": trace.breakdown(decode),
        "ffn_by_name": trace.by_name(decode),
        "attention_kernels": len(attention),
        "ffn_kernels": len(ffn),
    }


def _largest(found: Sequence[trace.Kernel], count: int = 40) -> dict[str, dict[str, float]]:
    total: dict[str, list[float]] = {}
    for kernel in found:
        total.setdefault(kernel.name[:80], []).append(kernel.duration)
    largest = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return {name: {"count": len(values), "us": round(sum(values), 1)} for name, values in largest}
