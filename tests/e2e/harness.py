# SPDX-License-Identifier: Apache-2.0
"""Runs one case of the embedded lane: a real FFN host and a real vLLM engine as attention, batch by batch.

The attention engine runs in the recording process (`afd_plugin.demo.native`), so nothing but the batch plan decides
which requests share a step, and a case is comparable with its native record bit for bit.
"""

import json
import os
import secrets
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from afd_plugin.config import AFDConfig, DensePlacement, GatePlacement, LinkSettings, Role, SharedPlacement
from afd_plugin.demo.engine import CPU_ENVIRONMENT, EngineArguments
from afd_plugin.demo.native import ONE_AT_A_TIME, BatchPlan, command
from afd_plugin.demo.records import Record, read_record
from afd_plugin.supervisor.ports import PortReservation
from afd_plugin.topology import Topology
from afd_plugin.v1.refusals import WORKER_CLASSES
from tests.e2e.teardown import CaseFailed, nothing_left

CASE_TIMEOUT_S = 240.0
WORKER_GRACE = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "30"}
"""vLLM's own 5 s are short for the last seconds of a dozen processes on two cores."""

STEP_RECORDERS = {
    Role.ATTENTION: "tests.e2e.recorders.AttentionRecorder",
    None: "tests.e2e.recorders.NativeRecorder",
}


@dataclass(frozen=True)
class Case:
    """What a run is made of. `ffn_model` and `ffn_module` are others than the product's only to plant a fault."""

    model: Path
    gate: GatePlacement = GatePlacement.FFN
    dense: DensePlacement = DensePlacement.ATTENTION
    shared: SharedPlacement = SharedPlacement.FFN
    topology: Topology = field(default_factory=Topology)
    engine: EngineArguments = field(default_factory=EngineArguments)
    plan: BatchPlan = ONE_AT_A_TIME
    ffn_model: Path | None = None
    ffn_module: str = "afd_plugin.cli.ffn_main"
    attention_worker: str = WORKER_CLASSES[Role.ATTENTION, "cpu"]

    def with_ffn(self, module: str, model: Path) -> "Case":
        """The same case with an FFN that is wrong: another program, another checkpoint."""
        return replace(self, ffn_module=module, ffn_model=model)

    def config(self, role: Role) -> AFDConfig:
        """The AFD configuration of one role."""
        return AFDConfig(role, topology=self.topology, gate=self.gate, dense=self.dense, shared=self.shared)


@dataclass(frozen=True)
class Outcome:
    """What a case left: the record, the role reports by worker name, the step log and both logs."""

    record: Record
    reports: Mapping[str, dict[str, Any]]
    folder: Path

    @property
    def attention(self) -> dict[str, Any]:
        """Report of the only attention worker."""
        return self.reports["attention-0-0"]

    @property
    def ffn(self) -> dict[str, Any]:
        """Report of the only FFN worker."""
        return self.reports["ffn-0-0"]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every process of the CPU lane; tests are importable from it."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, **CPU_ENVIRONMENT, **WORKER_GRACE, "PYTHONPATH": root, **(extra or {})}


def run_case(python: Path, case: Case, folder: Path) -> Outcome:
    """Run `case` to its end and check that both roles ended by themselves and left nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with nothing_left(folder) as traces, PortReservation() as port:
        link = LinkSettings(
            listen=f"127.0.0.1:{port.port}", peer=f"127.0.0.1:{port.port}", token=secrets.token_hex(8)
        )
        env = environment({**link.to_env(), **traces.environment, "AFD_ROLE_REPORT_DIR": str(folder)})
        output = folder / "record.json"
        extra = {
            "worker_cls": case.attention_worker,
            "additional_config": {"afd": case.config(Role.ATTENTION).to_additional_config()},
        }
        commands = {
            "ffn": [
                str(python),
                "-m",
                case.ffn_module,
                json.dumps(case.config(Role.FFN).to_additional_config()),
                str(case.ffn_model or case.model),
                *case.engine.flags(),
            ],
            "attention": [str(python), *command(case.model, output, case.engine, case.plan, extra)],
        }
        run_together(commands, env, folder)
    return Outcome(read_record(output), read_reports(folder), folder)


def run_together(commands: Mapping[str, list[str]], env: Mapping[str, str], folder: Path) -> None:
    """Start all commands, wait for all; CaseFailed unless each ends with 0 in time."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    deadline = time.monotonic() + CASE_TIMEOUT_S
    try:
        for name, words in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(words, env=dict(env), stdout=log, stderr=subprocess.STDOUT)
        for name, process in processes.items():
            status = process.wait(timeout=max(0.1, deadline - time.monotonic()))
            if status:
                raise CaseFailed(f"{name} ended with {status}; {tails(folder)}")
    except subprocess.TimeoutExpired:
        raise CaseFailed(f"the case did not end within {CASE_TIMEOUT_S:.0f} s; {tails(folder)}") from None
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def read_reports(folder: Path) -> dict[str, dict[str, Any]]:
    """The role reports in `folder`, by worker name."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for pattern in ("attention-*.json", "ffn-*.json")
        for path in folder.glob(pattern)
    }


def tails(folder: Path, lines: int = 30) -> str:
    """The ends of the logs in `folder`."""
    shown = []
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        shown.append(f"--- {log}\n" + "\n".join(text))
    return "\n".join(shown)


def faulty(case: Case, ffn_model: Path) -> Case:
    """The same case with another checkpoint in the FFN."""
    return replace(case, ffn_model=ffn_model)
