# SPDX-License-Identifier: Apache-2.0
"""What a GPU service must survive: the loss of a role while graphs replay, and a long life."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from qualify.gpu.engines import Engine, native, pair, wait_all
from qualify.gpu.host import GRAPH, PARITY_ENGINE, START_S, Host
from qualify.gpu.parity import parity, requests
from qualify.gpu.workloads import compare


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
            rows = [one.ask(60, "generate", **requests()) for one in (reference, again)]
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
