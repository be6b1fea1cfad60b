# SPDX-License-Identifier: Apache-2.0
"""TPOT of native engines and AFD side by side: DeepSeek-V2-Lite's shape with random weights, interleaved.

On one GPU three engines fit: two natives (their spread bounds what may be claimed) and AFD; or, with the setting
`native_default_mode`, one native, native in vLLM's default compile and graph mode, and AFD. The setting `switches`
names levers (:mod:`qualify.gpu.switches`), and AFD with the first of them takes the second native's place. On two GPUs:
native on one, native with TP2 on both, AFD with each connector.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qualify.gpu.engines import TWO_GPUS, VISIBLE, Engine, native, pair, role_report, wait_all
from qualify.gpu.host import START_S, Host
from qualify.gpu.switches import chosen
from qualify.gpu.workloads import V2_LITE, bench_prompts

BATCHES = (1, 32, 128, 256, 512)
NATIVE, AGAIN = "native-a", "native-b"
ENGINE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_batched_tokens": 8192,
    "seed": 0,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 8 << 30,
    "enable_flashinfer_autotune": False,
    "load_format": "dummy",
    "skip_tokenizer_init": True,
}


def arguments(batches: Sequence[int]) -> dict[str, Any]:
    """Engine arguments in FULL_DECODE_ONLY without compilation, with a graph for each batch size."""
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0, "cudagraph_capture_sizes": list(batches)}
    return {**ENGINE, "max_num_seqs": max(batches), "enforce_eager": False, "compilation_config": graphs}


def shape_folder(logs: Path, layers: int = V2_LITE["num_hidden_layers"]) -> Path:
    """A checkpoint folder that is nothing but the shape, with so many layers."""
    folder = logs / f"v2-lite-{layers}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**V2_LITE, "num_hidden_layers": layers}))
    return folder


def start(host: Host, batches: Sequence[int]) -> list[Engine]:
    """All engines of the comparison, starting at once."""
    folder, graph = shape_folder(host.logs), arguments(batches)
    default = {**graph, "compilation_config": {"cudagraph_capture_sizes": list(batches)}}
    engines: list[Engine] = []
    try:
        if host.gpus == 1:
            engines.append(native(NATIVE, folder, graph, host.logs))
            engines.append(pair("afd", folder, graph, host.logs))
            levers = list(chosen(host.setting("switches", [])[:1]).items())
            if host.setting("native_default_mode", False):
                engines.append(native("native-default", folder, default, host.logs))
            elif levers:
                ((name, switch),) = levers
                engines.append(
                    pair(
                        f"afd-{name}",
                        folder,
                        graph,
                        host.logs,
                        environment=switch.environment,
                        **switch.options,
                    )
                )
            else:
                engines.append(native(AGAIN, folder, graph, host.logs))
            return engines
        first = {VISIBLE: "0"}
        engines.append(native(NATIVE, folder, graph, host.logs, first))
        engines.append(native(AGAIN, folder, graph, host.logs, {VISIBLE: "1"}))
        engines.append(native("native-tp2", folder, {**graph, "tensor_parallel_size": 2}, host.logs))
        for name, connector in (("afd-ipc", "CudaIpcAFDConnector"), ("afd-nccl", "P2pNcclAFDConnector")):
            engines.append(pair(name, folder, graph, host.logs, connector=connector, visible=TWO_GPUS))
        return engines
    except BaseException:
        for one in engines:
            one.close(graceful=False)
        raise


def bench(host: Host) -> dict[str, Any]:
    """TPOT by engine and batch; engines take turns, and the order turns round with every repeat."""
    batches = host.setting("batches", list(BATCHES))
    repeats = host.setting("repeats", 5)
    lengths = host.setting("lengths", [16, 144])
    results: dict[str, dict[int, list[float]]] = {}
    checksums: dict[int, dict[str, list[int]]] = {}
    engines = start(host, batches)
    try:
        ready = wait_all(engines, min(START_S + 60, host.left()))
        repeats_done = 0
        for repeat in range(-1, repeats):
            if host.left() < 60:
                break
            for batch in batches:
                for one in engines if repeat % 2 == 0 else engines[::-1]:
                    prompts = bench_prompts(batch, max(repeat, 0), V2_LITE["vocab_size"] - 10000)
                    measured = one.ask(
                        120, "time", prompts=prompts, lengths=lengths if repeat >= 0 else [2, 8]
                    )
                    if repeat >= 0:
                        results.setdefault(one.name, {}).setdefault(batch, []).append(measured["tpot_ms"])
                        checksums.setdefault(batch, {}).setdefault(one.name, []).append(measured["checksum"])
            repeats_done += repeat >= 0
        statuses = {one.name: one.ask(60, "rpc", method="afd_status")[0] for one in engines if one.companions}
    except BaseException:
        for one in engines:
            one.close(graceful=False)
        raise
    with ThreadPoolExecutor(len(engines)) as pool:
        codes = list(pool.map(Engine.close, engines))
    return {
        "ready_s": ready,
        "repeats": repeats_done,
        "repeats_wanted": repeats,
        "tpot_ms": {
            name: {batch: summary(values) for batch, values in by.items()} for name, by in results.items()
        },
        "ratios": ratios(results),
        "same_tokens": {
            batch: {name: sums == by[NATIVE] for name, sums in by.items()} for batch, by in checksums.items()
        },
        "attention": {name: _attention(status) for name, status in statuses.items()},
        "ffn": {
            name: {
                key: value
                for key, value in role_report(host.logs, name, "ffn").items()
                if key not in ("units", "tensors_read")
            }
            for name in statuses
        },
        "exit_codes": codes,
        "passed": repeats_done == repeats,
    }


def _attention(status: Mapping[str, Any]) -> dict[str, Any]:
    keys = (
        "steps",
        "graph_steps",
        "exchanges",
        "exchange_seconds",
        "announce_seconds",
        "tokens",
        "device_steps",
    )
    return {key: status[key] for key in keys}


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the values."""
    return {
        "median": round(statistics.median(values), 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
        "values": [round(value, 3) for value in values],
    }


def ratios(results: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[int, dict[str, float]]:
    """Every engine over native by medians, and the native-against-native spread that bounds what may be claimed."""
    found: dict[int, dict[str, float]] = {}
    for batch, values in results.get(NATIVE, {}).items():
        again = results.get(AGAIN, {}).get(batch, [])
        both = [*values, *again]
        base = statistics.median(both)
        row = {"native_spread": round(max(both) / min(both), 3)}
        if again:
            row["native_b_over_a"] = round(statistics.median(again) / statistics.median(values), 3)
        for name, by in results.items():
            if name in (NATIVE, AGAIN) or batch not in by:
                continue
            row[f"{name}_over_native"] = round(statistics.median(by[batch]) / base, 3)
            if name.startswith("afd") and "native-default" in results:
                default = statistics.median(results["native-default"][batch])
                row[f"{name}_over_native-default"] = round(statistics.median(by[batch]) / default, 3)
        found[batch] = row
    return found
