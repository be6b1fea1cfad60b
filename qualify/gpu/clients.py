# SPDX-License-Identifier: Apache-2.0
"""Twelve clients at once, chunked prefills and cached prefixes, against native; and the same over HTTP."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qualify.gpu.engines import ENVIRONMENT, native, pair, wait_all
from qualify.gpu.host import GRAPH, PARITY_ENGINE, START_S, Host
from qualify.gpu.workloads import LOGPROBS, compare

CLIENTS = 12
REQUESTS = 256
LONGEST = 2000
QUIET_S = 20.0
"""How long an idle GPU is looked at."""

ENGINE: Mapping[str, Any] = {
    **PARITY_ENGINE,
    **GRAPH,
    "max_model_len": 2304,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "async_scheduling": False,  # else the moment at which a client's answer is seen would be a matter of luck
}


def prompts(count: int = REQUESTS, longest: int = LONGEST, vocabulary: int = 256) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, seeded; every fifth repeats the beginning of an earlier one."""
    draw = random.Random(20261130)
    found: list[list[int]] = []
    for index in range(count):
        length = (1, longest)[index] if index < 2 else draw.randint(1, longest)
        prompt = [draw.randrange(4, vocabulary) for _ in range(length)]
        if index % 5 == 4:
            earlier = found[draw.randrange(index)]
            prompt[: len(earlier)] = earlier[:length]
        found.append(prompt)
    return found


def clients(host: Host) -> dict[str, Any]:
    """256 requests of 12 clients: token ids and logprobs equal to native's, with steps that read prompts in part."""
    from afd_plugin.demo.checkpoints import make

    model = make(host.setting("clients_model", "deepseek-v2"))
    asked = prompts(host.setting("requests", REQUESTS))
    lengths = [4 + index % 13 for index in range(len(asked))]
    engines = [
        native("clients-native", model, ENGINE, host.logs),
        pair("clients-afd", model, ENGINE, host.logs),
    ]
    try:
        wait_all(engines, max(1.0, min(START_S, host.left())))
        for engine in engines:
            engine.tell("clients", prompts=asked, lengths=lengths, clients=CLIENTS, logprobs=LOGPROBS)
        theirs, mine = (engine.receive(max(30.0, host.left())) for engine in engines)
        status = engines[1].ask(30, "rpc", method="afd_status")[0]
    except BaseException:
        for engine in engines:
            engine.close(graceful=False)
        raise
    agreement = compare(mine["rows"], theirs["rows"])
    codes = [engine.close() for engine in engines]
    same_steps = {key: mine[key] == theirs[key] for key in ("steps", "partial_prefill_steps", "most_running")}
    return {
        "requests": len(asked),
        "clients": CLIENTS,
        "agreement": asdict(agreement),
        "exact": agreement.exact,
        "steps": mine["steps"],
        "partial_prefill_steps": mine["partial_prefill_steps"],
        "most_running": mine["most_running"],
        "same_batches": same_steps,
        "attention": {key: status[key] for key in ("steps", "graph_steps", "tokens", "exchanges")},
        "exit_codes": codes,
        "passed": agreement.exact
        and mine["partial_prefill_steps"] > 0
        and all(same_steps.values())
        and all(code == 0 for one in codes for code in one.values()),
    }


def service_command(model: Path, name: str, port: int, engine: Any) -> list[str]:
    """`afd serve` on this host's GPU, as a user types it."""
    return [
        sys.executable, "-m", "afd_plugin.cli", "serve", str(model), "--port", str(port),
        "--served-model-name", name, *engine.serving_flags(),
        "--kv-cache-memory-bytes", str(1 << 30), "-cc.cudagraph_mode=FULL_DECODE_ONLY",
    ]  # fmt: skip


def serving(host: Host) -> dict[str, Any]:
    """`afd serve`: ready, answers 12 clients over HTTP, is idle without touching the GPU, ends with 0 on SIGTERM.

    The setting `idle_s` is how long the stretch without a request lasts. With `quiet_file` other parts may use the GPU
    meanwhile: when that file exists they are over, and only then the GPU's utilisation is looked at.
    """
    import os

    from afd_plugin.demo.checkpoints import make
    from afd_plugin.demo.engine import EngineArguments
    from afd_plugin.demo.prompts import PROMPTS
    from afd_plugin.demo.service import Service

    idle_s, quiet_file = float(host.setting("idle_s", QUIET_S)), host.setting("quiet_file", None)
    engine = EngineArguments(enforce_eager=False, max_num_batched_tokens=512, enable_prefix_caching=True)
    environment = {**os.environ, **ENVIRONMENT}
    before = memory_used()
    with Service(
        service_command, make("deepseek-v2"), "deepseek-v2", engine, host.logs / "serving", environment
    ) as service:
        outcome: dict[str, Any] = {
            "ready_s": round(service.await_ready(max(30.0, min(START_S, host.left()))), 1)
        }
        alone = [service.endpoint.complete(prompt)[0] for prompt in PROMPTS[:4]]
        with ThreadPoolExecutor(CLIENTS) as pool:
            many = list(pool.map(service.endpoint.complete, [PROMPTS[i % len(PROMPTS)] for i in range(96)]))
        outcome["answers"] = len(many)
        outcome["answered_whole"] = all(
            len(answer.token_ids) == len(many[0][0].token_ids) for answer, _ in many
        )
        began = time.monotonic()
        time.sleep(2)
        if quiet_file is not None:
            time.sleep(max(0.0, idle_s - QUIET_S))
            await_file(Path(quiet_file), host.left() - 60)
            idle_s = QUIET_S
        outcome["idle"] = idle(min(idle_s, max(5.0, host.left() - 60)))
        outcome["without_a_request_s"] = round(time.monotonic() - began, 1)
        again = [service.endpoint.complete(prompt)[0] for prompt in PROMPTS[:4]]
        outcome["same_after_idle"] = [one.token_ids for one in again] == [one.token_ids for one in alone]
        outcome["exit_code"] = service.stop()
    time.sleep(2)
    outcome["memory_mib"] = {"before": before, "after": memory_used()}
    outcome["passed"] = (
        outcome["exit_code"] == 0 and outcome["answered_whole"] and outcome["same_after_idle"]
        and outcome["idle"]["most_percent"] == 0
    )  # fmt: skip
    return outcome


def await_file(path: Path, timeout_s: float) -> None:
    """TimeoutError unless the file comes to be in time."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come to be within {timeout_s:.0f} s")
        time.sleep(0.5)


def idle(seconds: float) -> dict[str, Any]:
    """Utilisation of the GPUs as the driver sees it, once a second, while nobody asks anything."""
    samples: list[int] = []
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        samples.append(max(_queried("utilization.gpu")))
        time.sleep(1.0)
    return {
        "seconds": round(time.monotonic() - started, 1),
        "samples": len(samples),
        "most_percent": max(samples, default=0),
    }


def memory_used() -> list[int]:
    """MiB in use on every GPU by the driver's own count."""
    return _queried("memory.used")


def memory_by_process() -> dict[int, int]:
    """MiB of each process on the GPUs by the driver's own count; empty where it does not tell."""
    found: dict[int, int] = {}
    for line in _told("--query-compute-apps=pid,used_memory"):
        pid, _, used = (word.strip() for word in line.partition(","))
        if pid.isdigit() and used.isdigit():
            found[int(pid)] = found.get(int(pid), 0) + int(used)
    return found


def _queried(field: str) -> list[int]:
    return [int(line) for line in _told(f"--query-gpu={field}")]


def _told(query: str) -> list[str]:
    """The rows that the driver's tool answers."""
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if line.strip()]
