# SPDX-License-Identifier: Apache-2.0
"""What a GPU service must survive: the loss of a role while graphs replay, and a long life."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from qualify.gpu.clients import memory_by_process, memory_used
from qualify.gpu.engines import TWO_GPUS, Engine, native, pair, wait_all
from qualify.gpu.host import GRAPH, PARITY_ENGINE, START_S, Host
from qualify.gpu.parity import requests
from qualify.gpu.workloads import compare

BOUND_S = 15.0
"""The failure timeout (10 s) and what an engine core needs to end after its worker did."""

FREED_S, FREED_MIB = 20.0, 1024
"""How soon after a loss the GPU's memory is free again, and what may be left (an MPS server's contexts)."""

PREFILLS = 1000


def connectors(host: Host) -> tuple[str, ...]:
    """What is struck: on one GPU the connector that can share it, on two both."""
    ipc = ("CudaIpcAFDConnector",)
    return ipc if host.gpus == 1 else (*ipc, "P2pNcclAFDConnector")


def faults(host: Host) -> dict[str, Any]:
    """kill -9 of either role while graphs replay: the other ends within the bound, the GPU is free, the next serves."""
    from afd_plugin.demo.checkpoints import make

    model = make("deepseek-v2")
    visible = TWO_GPUS if host.gpus == 2 else None
    before = memory_used()
    outcome: dict[str, Any] = {"bound_s": BOUND_S, "memory_mib_before": before}
    options = {**PARITY_ENGINE, **GRAPH}

    def started(connector: str, life: str) -> Engine:
        name = f"fault-{connector[:7]}-{life}"
        return pair(name, model, options, host.logs, connector=connector, visible=visible)

    pairs = {
        (connector, victim): started(connector, victim)
        for connector in connectors(host)
        for victim in ("ffn", "attention")
    }
    try:
        wait_all(list(pairs.values()), max(1.0, min(START_S, host.left())))
        for (connector, victim), engine in pairs.items():
            outcome[f"{connector} without {victim}"] = _killed(engine, victim)
    finally:
        for engine in pairs.values():
            engine.close(graceful=False)
    # what runs beside this part has memory of its own
    outcome["memory_freed"] = _freed(outcome, before) if not host.setting("beside", False) else "not judged"
    engines = [native("fault-native", model, options, host.logs)]
    try:
        engines += [started(connector, "again") for connector in connectors(host)]
        wait_all(engines, max(1.0, min(START_S, host.left())))
        reference, *rows = [one.ask(60, "generate", **requests()) for one in engines]
        again = [compare(row, reference) for row in rows]
    except BaseException:
        for engine in engines:
            engine.close(graceful=False)
        raise
    outcome["next_start"] = {
        "agreements": [asdict(agreement) for agreement in again],
        "exit_codes": [engine.close() for engine in engines],
    }
    struck = [value for key, value in outcome.items() if " without " in key]
    outcome["passed"] = (
        all(agreement.exact for agreement in again)
        and all(code == 0 for codes in outcome["next_start"]["exit_codes"] for code in codes.values())
        and all(one["both_alive_before"] for one in struck)
        and all(one["seconds"] <= BOUND_S and one["survivor_exit_code"] not in (0, None) for one in struck)
        and outcome["memory_freed"] is not False
    )  # fmt: skip
    return outcome


def _freed(outcome: dict[str, Any], before: Sequence[int]) -> bool:
    """Whether the GPUs have within a while what they had before, but for what a daemon's server keeps."""
    deadline = time.monotonic() + FREED_S
    while True:
        after = outcome["memory_mib_after"] = memory_used()
        if all(now <= once + FREED_MIB for once, now in zip(before, after, strict=True)):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def _killed(engine: Engine, victim: str) -> dict[str, Any]:
    """Kill the worker of one role while both replay; how and when the other role's process ended."""
    prompts = [[5 + index, 6, 7, 8] for index in range(64)]
    engine.tell("generate", prompts=prompts, lengths=[480] * 64, logprobs=0)
    time.sleep(0.6)
    companion = engine.companions[0]
    root, survivor = (
        (companion.process.pid, engine.process) if victim == "ffn" else (engine.pid, companion.process)
    )
    busy = survivor.poll() is None and companion.process.poll() is None
    os.kill(_workers_below(root)[-1], signal.SIGKILL)
    started = time.monotonic()
    try:
        code: int | None = survivor.wait(30)
    except subprocess.TimeoutExpired:
        code = None
    return {
        "both_alive_before": busy,
        "survivor_exit_code": code,
        "seconds": round(time.monotonic() - started, 2),
    }


def endurance(host: Host) -> dict[str, Any]:
    """A thousand prefills of distinct lengths leave the FFN's memory as ten did; no host synchronisation in a step.

    Where the driver does not tell processes apart the GPU's memory is judged, and then nothing else may run on it.
    """
    from afd_plugin.demo.checkpoints import make

    arguments = {
        **PARITY_ENGINE, **GRAPH, "max_num_batched_tokens": 2048, "max_model_len": 2048,
        "kv_cache_memory_bytes": 2 << 30,
    }  # fmt: skip
    engine = pair(
        "endurance", make("deepseek-v2"), arguments, host.logs, environment={"VLLM_GPU_SYNC_CHECK": "error"}
    )
    lengths = [2 + index for index in range(PREFILLS + 10)]
    done = 10
    try:
        engine.receive(max(1.0, min(START_S, host.left())))
        _prefill(engine, [lengths[-1], *lengths[:9]])
        after_ten = _held(engine)
        rest = lengths[9:-1]
        while done < PREFILLS + 10 and host.left() > 40:
            part = rest[done - 10 : done + 30]
            if not part:
                break
            _prefill(engine, part)
            done += len(part)
        after_all = _held(engine)
        status = engine.ask(30, "rpc", method="afd_status")[0]
    except BaseException:
        engine.close(graceful=False)
        raise
    codes = engine.close()
    # attention's grows with its largest prefill, as natively; the FFN holds nothing of a request
    own = {name: before for name, before in after_ten.items() if name != "attention"}
    grown = max(after_all[name] - before for name, before in own.items())
    return {
        "distinct_lengths": done,
        "memory_mib_after_10": after_ten,
        "memory_mib_after_all": after_all,
        "grown_mib": grown,
        "sync_check": "VLLM_GPU_SYNC_CHECK=error in every process; a synchronisation would have failed the step",
        "attention": {key: status[key] for key in ("steps", "graph_steps", "tokens", "exchanges")},
        "exit_codes": codes,
        "passed": set(codes.values()) == {0} and done >= PREFILLS and grown <= 0.01 * max(own.values()),
    }


def _held(engine: Engine) -> dict[str, int]:
    """MiB of each role's processes, or of each GPU where the driver does not tell them apart."""
    import psutil

    roots = {"attention": engine.pid, "ffn": engine.companions[0].process.pid}
    own = {
        role: {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}
        for role, root in roots.items()
    }
    seen = memory_by_process()
    held = {role: sum(size for pid, size in seen.items() if pid in pids) for role, pids in own.items()}
    if all(held.values()):
        return held
    return {f"gpu{index}": size for index, size in enumerate(memory_used())}


def _prefill(engine: Engine, lengths: Sequence[int]) -> None:
    prompts = [[4 + (length + position) % 250 for position in range(length)] for length in lengths]
    engine.ask(180, "generate", prompts=prompts, lengths=[2] * len(prompts), logprobs=0)


def _workers_below(root: int) -> list[int]:
    """The processes below ``root`` that hold a GPU context, by their command line, oldest first."""
    import psutil

    below = psutil.Process(root).children(recursive=True)
    return [child.pid for child in below if "resource_tracker" not in " ".join(child.cmdline())]
