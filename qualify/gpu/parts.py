# SPDX-License-Identifier: Apache-2.0
"""The parts of a GPU go that are one function each; parity and faults have modules of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from qualify.gpu import exchange_bench, probe
from qualify.gpu.engines import native
from qualify.gpu.host import EAGER, PARITY_ENGINE, RUN_S, START_S, Host
from qualify.gpu.workloads import LOGPROBS


def control(host: Host) -> dict[str, Any]:
    """AFD off: a native engine serves a request, and the smallest call of the extension gives what it must.

    The answer's tokens are counted, not judged: in bfloat16 these models have no oracle.
    """
    from afd_plugin.demo.checkpoints import make

    kernels, length = bool(probe.ask("kernels")["exact"]), 8
    with native("control", make("deepseek-v2"), {**PARITY_ENGINE, **EAGER}, host.logs) as engine:
        ready = engine.receive(START_S)
        rows = engine.ask(RUN_S, "generate", prompts=[[5, 6, 7, 8]], lengths=[length], logprobs=LOGPROBS)
    tokens = rows[0]["tokens"]
    passed = kernels and len(tokens) == length
    return {"kernels_exact": kernels, "native_ready": ready, "tokens": tokens, "passed": passed}


def contract(host: Host) -> dict[str, Any]:
    """The connector contract between real processes, by pytest; the end of its output is the evidence."""
    command = [
        sys.executable, "-m", "pytest", "tests/gpu_e2e/test_contract.py", "-q", f"--gpus={host.gpus}",
        "-o", "addopts=", "--import-mode=importlib",
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


def exchange(host: Host) -> dict[str, Any]:
    """Microseconds of a bare exchange, by variant; between two GPUs also how NCCL connects them."""
    outcome: dict[str, Any] = {}
    for name, setup in setups(host).items():
        try:
            rows = exchange_bench.measure(setup)
        except (TimeoutError, EOFError, OSError) as error:
            outcome[name] = {
                "setup": exchange_bench.described(setup),
                "error": f"{type(error).__name__}: {error}",
            }
            continue
        outcome[name] = {"setup": exchange_bench.described(setup), "rows": rows}
        if "NCCL_DEBUG_FILE" in setup.environment:
            outcome[name]["transports"] = exchange_bench.transports(host.logs, f"nccl-{name}-")
    return {"variants": outcome, "passed": not any("error" in one for one in outcome.values())}


def setups(host: Host) -> dict[str, exchange_bench.Setup]:
    """What is measured side by side on a host with so many GPUs."""
    wanted = host.setting("variants", None)
    if host.gpus == 1:
        found = {name: exchange_bench.Setup(name) for name in ("ipc-push", "ipc-copy")}
    else:
        apart = ("cuda:1", "cuda:0")
        sizes = exchange_bench.TWO_GPUS
        found = {name: exchange_bench.Setup(name, apart, sizes) for name in ("ipc-push", "ipc-copy")}
        for name, disabled in (("nccl-group", "0"), ("nccl-plain", "0"), ("nccl-group-no-p2p", "1")):
            found[name] = exchange_bench.Setup(
                name.removesuffix("-no-p2p"), apart, sizes,
                environment={
                    "NCCL_P2P_DISABLE": disabled, "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO",
                    "NCCL_DEBUG_FILE": str(host.logs / f"nccl-{name}-%p.log"),
                },
            )  # fmt: skip
    return found if wanted is None else {name: found[name] for name in wanted}


def links(host: Host) -> dict[str, Any]:
    """How the GPUs are linked, in the driver's own words."""
    outcome: dict[str, Any] = {}
    for name, words in (("topology", ["topo", "-m"]), ("nvlink", ["nvlink", "--status"])):
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=False)
        outcome[name] = {
            "exit_code": done.returncode,
            "lines": (done.stdout or done.stderr).splitlines()[:60],
        }
    return {**outcome, "passed": outcome["topology"]["exit_code"] == 0}
