# SPDX-License-Identifier: Apache-2.0
"""The parts of a GPU go that are one function each; parity and faults have modules of their own."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qualify.gpu import exchange_bench
from qualify.gpu.engines import Engine, native, pair, role_report, wait_all
from qualify.gpu.host import EAGER, PARITY_ENGINE, RUN_S, START_S, Host
from qualify.gpu.workloads import LOGPROBS, V2_LITE, bench_prompts


def control(host: Host) -> dict[str, Any]:
    """AFD off: a native engine serves a request, and the smallest call of the extension gives what it must."""
    import torch

    from afd_plugin.connectors import exchange_ops as ops
    from afd_plugin.demo.checkpoints import make

    ops.load_kernels()
    parts = torch.randn(3, 1000, device="cuda").to(torch.bfloat16)
    total = torch.empty_like(parts[0])
    ops.combine(total, [part.data_ptr() for part in parts])
    expected = parts.float().cumsum(0)[-1].to(torch.bfloat16)
    gathered = torch.empty(3, 1000, dtype=torch.bfloat16, device="cuda")
    ops.gather(gathered, [ops.Run(parts[i].data_ptr(), (2 - i) * 2000, 2000) for i in range(3)])
    kernels = bool(torch.equal(total, expected)) and bool(torch.equal(gathered, parts.flip(0)))
    with native("control", make("deepseek-v2"), {**PARITY_ENGINE, **EAGER}, host.logs) as engine:
        ready = engine.receive(START_S)
        rows = engine.ask(RUN_S, "generate", prompts=[[5, 6, 7, 8]], lengths=[8], logprobs=LOGPROBS)
    return {"kernels_exact": kernels, "native_ready": ready, "tokens": rows[0]["tokens"], "passed": kernels}


def contract(host: Host) -> dict[str, Any]:
    """The connector contract between real processes, by pytest; the end of its output is the evidence."""
    command = [
        sys.executable, "-m", "pytest", "tests/gpu_e2e", "-q", "-o", "addopts=", "--import-mode=importlib",
        "-p", "no:cacheprovider", "-W", "default", *host.setting("pytest", []),
    ]  # fmt: skip
    log = host.logs / "contract.log"
    with log.open("w") as sink:
        done = subprocess.run(
            command, stdout=sink, stderr=subprocess.STDOUT, timeout=max(30.0, host.left()), check=False
        )
    lines = log.read_text(errors="replace").splitlines()
    summary_lines = [
        line for line in lines if line.startswith(("FAILED", "ERROR", "PASSED")) or " passed" in line
    ]
    return {"exit_code": done.returncode, "summary": summary_lines[-40:], "passed": done.returncode == 0}


def exchange(host: Host) -> list[dict[str, Any]]:
    """Microseconds of a bare exchange."""
    return exchange_bench.measure()


def bench(host: Host) -> dict[str, Any]:
    """TPOT of two native engines and one AFD pair, interleaved; DeepSeek-V2-Lite's shape with random weights."""
    import json

    batches = host.setting("batches", [1, 32, 128, 256])
    repeats = host.setting("repeats", 5)
    lengths = host.setting("lengths", [16, 144])
    default_mode = host.setting("native_default_mode", True)
    folder = host.logs / "v2-lite"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(V2_LITE)))
    engine: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": max(batches),
        "seed": 0,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 8 << 30,
        "enable_flashinfer_autotune": False,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    }
    graph = {
        "enforce_eager": False,
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "mode": 0,
            "cudagraph_capture_sizes": batches,
        },
    }
    engines: list[Engine] = []
    results: dict[str, dict[int, list[float]]] = {}
    checksums: dict[int, dict[str, list[int]]] = {}
    try:
        engines += [native("native-a", folder, {**engine, **graph}, host.logs)]
        engines += [native("native-b", folder, {**engine, **graph}, host.logs)]
        engines += [pair("afd", folder, {**engine, **graph}, host.logs)]
        if default_mode:
            engines += [
                native(
                    "native-default",
                    folder,
                    {**engine, "compilation_config": {"cudagraph_capture_sizes": batches}},
                    host.logs,
                )
            ]
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
        status = engines[2].ask(60, "rpc", method="afd_status")[0]
        status.pop("tensor_names", None)
    except BaseException:
        for one in engines:
            one.close(graceful=False)
        raise
    with ThreadPoolExecutor(len(engines)) as pool:
        codes = list(pool.map(Engine.close, engines))
    return {
        "ready_s": ready,
        "repeats": repeats_done,
        "tpot_ms": {
            name: {batch: summary(values) for batch, values in by.items()} for name, by in results.items()
        },
        "ratios": _ratios(results),
        "same_tokens": {
            batch: by.get("afd") == by.get("native-a") == by.get("native-b")
            for batch, by in checksums.items()
        },
        "attention": {
            key: status[key]
            for key in ("steps", "graph_steps", "exchanges", "exchange_seconds", "tokens", "device_steps")
        },
        "ffn": {
            k: v
            for k, v in role_report(host.logs, "afd", "ffn").items()
            if k not in ("units", "tensors_read")
        },
        "exit_codes": codes,
    }


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the values."""
    return {
        "median": round(statistics.median(values), 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
        "values": [round(value, 3) for value in values],
    }


def _ratios(results: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[int, dict[str, float]]:
    """AFD over native by medians, and the native-against-native spread that bounds what may be claimed."""
    ratios: dict[int, dict[str, float]] = {}
    for batch, values in results.get("native-a", {}).items():
        both = [*values, *results["native-b"][batch]]
        ratios[batch] = {
            "afd_over_native": round(statistics.median(results["afd"][batch]) / statistics.median(both), 3),
            "native_b_over_a": round(
                statistics.median(results["native-b"][batch]) / statistics.median(values), 3
            ),
            "native_spread": round(max(both) / min(both), 3),
        }
        if "native-default" in results:
            base = statistics.median(results["native-default"][batch])
            ratios[batch]["afd_over_native_default"] = round(
                statistics.median(results["afd"][batch]) / base, 3
            )
    return ratios
