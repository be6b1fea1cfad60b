# SPDX-License-Identifier: Apache-2.0
"""The parts of a GPU go: each a function of the host that returns its evidence as plain data."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qualify.gpu import exchange_bench
from qualify.gpu.engines import Engine, native, pair, role_report, wait_all
from qualify.gpu.workloads import (
    LOGPROBS,
    PARITY_TOKENS,
    V2_LITE,
    bench_prompts,
    compare,
    parity_prompts,
)

START_S = 240.0
RUN_S = 180.0

PARITY_ENGINE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "seed": 0,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_flashinfer_autotune": False,
}
EAGER: Mapping[str, Any] = {"enforce_eager": True}
GRAPH: Mapping[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0},
}
MODES: Mapping[str, Mapping[str, Any]] = {"eager": EAGER, "graph": GRAPH}


@dataclass
class Host:
    """Where the parts run: folder of the logs, the moment by which all must be over, settings from the
    command line.
    """

    logs: Path
    deadline: float
    settings: Mapping[str, Any]

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def setting(self, name: str, default: Any) -> Any:
        return self.settings.get(name, default)


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


# ------------------------------------------------------------------ parity


@dataclass(frozen=True)
class ParityCase:
    """One AFD cell to compare with the native engine of the same model and mode."""

    model: str
    mode: str
    gate: str = "ffn"
    dense: str = "attention"
    microbatches: int = 1

    @property
    def name(self) -> str:
        name = f"{self.model}-{self.mode}-gate-{self.gate}"
        name += "" if self.dense == "attention" else "-dense-ffn"
        return name if self.microbatches == 1 else f"{name}-dbo"


DEFAULT_CASES: tuple[ParityCase, ...] = tuple(
    ParityCase(model, mode, gate)
    for model in ("deepseek-v2", "deepseek-v3", "qwen3-moe")
    for mode in ("eager", "graph")
    for gate in ("ffn", "attention")
)


def parity(host: Host) -> dict[str, Any]:
    """Every case against native, twice; 64 prompts, lengths around 64 tokens so that decode batches shrink."""
    from afd_plugin.demo.checkpoints import make

    cases = [ParityCase(**raw) for raw in host.setting("cases", [])] or list(DEFAULT_CASES)
    models = {case.model: make(case.model) for case in cases}
    references = sorted({(case.model, case.mode) for case in cases})
    workers = host.setting("workers", 4)
    with ThreadPoolExecutor(workers) as pool:
        # in this order, so that no case waits for a reference that has no thread
        futures = {key: pool.submit(_native_rows, host, models[key[0]], *key) for key in references}
        outcomes = list(pool.map(lambda case: _case(host, models[case.model], case, futures), cases))
        native_runs = {key: future.result() for key, future in futures.items()}
    return {
        "prompts": len(parity_prompts()),
        "native_against_itself": {
            "-".join(key): asdict(compare(*runs[:2])) for key, runs in native_runs.items()
        },
        "native_in_other_batches": {
            "-".join(key): asdict(compare(runs[0], runs[2])) for key, runs in native_runs.items()
        },
        "cases": outcomes,
        "passed": all(map(_as_promised, outcomes)),
    }


def _as_promised(outcome: Mapping[str, Any]) -> bool:
    """Exact; a split batch, whose kernels see other sizes than native's, within what sizes change natively."""
    if not outcome["case"].endswith("-dbo") or "agreements" not in outcome:
        return bool(outcome.get("exact"))
    stages = (
        outcome["attention"]["device_steps"]["eager"][1] + outcome["attention"]["device_steps"]["replayed"][1]
    )
    largest = max(agreement["largest_first_difference"] for agreement in outcome["agreements"])
    return bool(stages) and largest <= outcome["tolerance"]


def _requests() -> dict[str, Any]:
    prompts = parity_prompts()
    lengths = [PARITY_TOKENS + (index % 8) for index in range(len(prompts))]
    return {"prompts": prompts, "lengths": lengths, "logprobs": LOGPROBS}


def _native_rows(host: Host, model: Path, name: str, mode: str) -> list[Any]:
    with native(f"native-{name}-{mode}", model, {**PARITY_ENGINE, **MODES[mode]}, host.logs) as engine:
        engine.receive(max(1.0, min(START_S, host.left())))
        runs = [engine.ask(min(RUN_S, host.left()), "generate", **_requests()) for _ in range(2)]
        # the same prompts in other company: what batch sizes alone change, natively
        everything = _requests()
        other: list[Any] = []
        for first in (0, 32):
            part = {key: everything[key][first : first + 32] for key in ("prompts", "lengths")}
            other += engine.ask(min(RUN_S, host.left()), "generate", **part, logprobs=LOGPROBS)
        return [*runs, other]


def _case(
    host: Host, model: Path, case: ParityCase, references: Mapping[tuple[str, str], Future[list[Any]]]
) -> dict[str, Any]:
    outcome: dict[str, Any] = {"case": case.name}
    if host.left() < 45:
        return {**outcome, "skipped": "no time left", "exact": False}
    try:
        engine = pair(
            case.name, model, {**PARITY_ENGINE, **MODES[case.mode]}, host.logs,
            gate=case.gate, dense=case.dense, microbatches=case.microbatches,
        )  # fmt: skip
        try:
            outcome["ready_s"] = engine.receive(max(1.0, min(START_S, host.left())))["ready_s"]
            runs = [engine.ask(min(RUN_S, host.left()), "generate", **_requests()) for _ in range(2)]
            status = engine.ask(30, "rpc", method="afd_status")[0]
        except BaseException:
            engine.close(graceful=False)
            raise
        outcome["exit_codes"] = engine.close()
    except Exception as error:  # noqa: BLE001 - the case's outcome
        return {**outcome, "error": f"{type(error).__name__}: {error}"[-5000:], "exact": False}
    reference = references[case.model, case.mode].result()
    agreements = [compare(mine, theirs) for mine, theirs in zip(runs, reference[:2], strict=True)]
    status.pop("tensor_names", None)
    outcome.update(
        agreements=[asdict(agreement) for agreement in agreements],
        exact=all(agreement.exact for agreement in agreements),
        tolerance=compare(reference[0], reference[2]).largest_first_difference,
        attention={
            key: status[key] for key in ("steps", "graph_steps", "exchanges", "device_steps") if key in status
        },
        ffn={
            key: value
            for key, value in role_report(host.logs, case.name, "ffn").items()
            if key in ("steps", "eager", "captures", "replays", "uncaptured", "device_steps", "exchanges")
        },
    )
    return outcome


# ------------------------------------------------------------------ bench


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


# ------------------------------------------------------------------ faults


def faults(host: Host) -> dict[str, Any]:
    """kill -9 of either role while graphs replay: the other ends within the bound, the GPU is free, the next serves.

    The setting `cases` names parity cases to run beside the pairs while these start.
    """
    from afd_plugin.demo.checkpoints import make

    model = make("deepseek-v2")
    outcome: dict[str, Any] = {"used_bytes_before": _used_bytes()}
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(parity, host) if host.setting("cases", []) else None
        pairs = {
            victim: pair(f"fault-{victim}", model, {**PARITY_ENGINE, **GRAPH}, host.logs)
            for victim in ("ffn", "attention")
        }
        try:
            wait_all(list(pairs.values()), max(1.0, min(START_S, host.left())))
            if beside is not None:
                outcome["beside"] = beside.result()
            for victim, engine in pairs.items():
                outcome[victim] = _killed(engine, victim)
        finally:
            for engine in pairs.values():
                engine.close(graceful=False)
    time.sleep(2.0)
    outcome["used_bytes_after"] = _used_bytes()
    with native("fault-native", model, {**PARITY_ENGINE, **GRAPH}, host.logs) as reference:
        again = pair("fault-again", model, {**PARITY_ENGINE, **GRAPH}, host.logs)
        try:
            wait_all([reference, again], max(1.0, min(START_S, host.left())))
            rows = [one.ask(60, "generate", **_requests()) for one in (reference, again)]
        except BaseException:
            again.close(graceful=False)
            raise
        outcome["next_start"] = {"agreement": asdict(compare(*rows)), "exit_codes": again.close()}
    outcome["passed"] = (
        outcome["next_start"]["agreement"]["equal_logprobs"]
        == (outcome["next_start"]["agreement"]["logprobs"])
    )
    return outcome


def _killed(engine: Engine, victim: str) -> dict[str, Any]:
    """Kill the worker of one role while both replay; how and when the other role's process ended."""
    prompts = [[5 + index, 6, 7, 8] for index in range(64)]
    engine.tell("generate", prompts=prompts, lengths=[480] * 64, logprobs=0)
    time.sleep(0.4)
    companion = engine.companions[0]
    root, survivor = (
        (companion.process.pid, engine.process) if victim == "ffn" else (engine.pid, companion.process)
    )
    os.kill(_workers_below(root)[-1], signal.SIGKILL)
    started = time.monotonic()
    try:
        code: int | str = survivor.wait(30)
    except subprocess.TimeoutExpired:
        code = "still alive after 30 s"
    return {"survivor_exit_code": code, "seconds": round(time.monotonic() - started, 2)}


def endurance(host: Host) -> dict[str, Any]:
    """A thousand prefills of distinct lengths leave the GPU's memory as ten did; no host synchronisation in a step."""
    from afd_plugin.demo.checkpoints import make

    arguments = {**PARITY_ENGINE, **GRAPH, "max_num_batched_tokens": 2048, "max_model_len": 2048}
    engine = pair(
        "endurance", make("deepseek-v2"), arguments, host.logs, environment={"VLLM_GPU_SYNC_CHECK": "error"}
    )
    try:
        engine.receive(max(1.0, min(START_S, host.left())))

        def prefill(lengths: Sequence[int]) -> None:
            for first in range(0, len(lengths), 20):
                prompts = [
                    [4 + (length + i) % 250 for i in range(length)] for length in lengths[first : first + 20]
                ]
                engine.ask(120, "generate", prompts=prompts, lengths=[2] * len(prompts), logprobs=0)

        lengths = [2 + (index * 997) % 1999 for index in range(1010)]
        prefill(lengths[:10])
        after_ten = _free_bytes()
        prefill(lengths[10:])
        after_thousand = _free_bytes()
        status = engine.ask(30, "rpc", method="afd_status")[0]
    except BaseException:
        engine.close(graceful=False)
        raise
    codes = engine.close()
    return {
        "distinct_lengths": len(set(lengths)),
        "free_bytes_after_10": after_ten,
        "free_bytes_after_1000": after_thousand,
        "grown_bytes": after_ten - after_thousand,
        "sync_check": "VLLM_GPU_SYNC_CHECK=error in every process; a synchronisation would have failed the step",
        "attention": {key: status[key] for key in ("steps", "graph_steps", "tokens", "exchanges")},
        "exit_codes": codes,
        "passed": set(codes.values()) == {0},
    }


def _free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])


def _used_bytes() -> int:
    """Memory in use on the GPU by the driver's own count."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    return int(done.stdout.splitlines()[0]) << 20


def _workers_below(root: int) -> list[int]:
    """The processes below ``root`` that hold a GPU context, by their command line, oldest first."""
    import psutil

    below = psutil.Process(root).children(recursive=True)
    return [child.pid for child in below if "resource_tracker" not in " ".join(child.cmdline())]
