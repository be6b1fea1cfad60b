# SPDX-License-Identifier: Apache-2.0
"""Runs one case of the embedded lane: a real FFN host and a real vLLM engine as attention, batch by batch.

The attention engine runs in the recording process (`afd_plugin.demo.native`), so nothing but the batch plan decides
which requests share a step, and a case is comparable with its native record bit for bit.
"""

import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from afd_plugin.config import AFDConfig, DensePlacement, GatePlacement, LinkSettings, Role
from afd_plugin.demo.engine import CPU_ENVIRONMENT, EngineArguments
from afd_plugin.demo.native import ONE_AT_A_TIME, BatchPlan, command
from afd_plugin.demo.records import Record, read_record
from afd_plugin.supervisor.ports import PortReservation
from afd_plugin.topology import Topology
from afd_plugin.v1.refusals import WORKER_CLASSES

CASE_TIMEOUT_S = 240.0
MARKER = "AFD_E2E_CASE"
"""Every process of a case carries it in its environment, whoever its parent is by then."""

STEP_RECORDERS = {
    Role.ATTENTION: "tests.e2e.recorders.AttentionRecorder",
    None: "tests.e2e.recorders.NativeRecorder",
}


@dataclass(frozen=True)
class Case:
    """What a run is made of. `ffn_model` differs from `model` only to plant a fault."""

    model: Path
    gate: GatePlacement = GatePlacement.FFN
    dense: DensePlacement = DensePlacement.ATTENTION
    topology: Topology = field(default_factory=Topology)
    engine: EngineArguments = field(default_factory=EngineArguments)
    plan: BatchPlan = ONE_AT_A_TIME
    ffn_model: Path | None = None
    attention_worker: str = WORKER_CLASSES[Role.ATTENTION, "cpu"]

    def config(self, role: Role) -> AFDConfig:
        """The AFD configuration of one role."""
        return AFDConfig(role, topology=self.topology, gate=self.gate, dense=self.dense)


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


class CaseFailed(AssertionError):
    """A process of a case failed, hung or was left behind; the ends of the logs are quoted."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every process of the CPU lane; tests are importable from it."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, **CPU_ENVIRONMENT, "PYTHONPATH": root, **(extra or {})}


def run_case(python: Path, case: Case, folder: Path) -> Outcome:
    """Run `case` to its end and check that both roles ended by themselves and left nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = secrets.token_hex(8)
    before = leftovers()
    with PortReservation() as port, ExitStack() as stack:
        link = LinkSettings(
            listen=f"127.0.0.1:{port.port}", peer=f"127.0.0.1:{port.port}", token=secrets.token_hex(8)
        )
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="e2e-"))
        variables = {"AFD_ROLE_REPORT_DIR": str(folder), "TMPDIR": scratch, MARKER: marker}
        env = environment({**link.to_env(), **variables})
        output = folder / "record.json"
        extra = {
            "worker_cls": case.attention_worker,
            "additional_config": {"afd": case.config(Role.ATTENTION).to_additional_config()},
        }
        commands = {
            "ffn": [
                str(python),
                "-m",
                "afd_plugin.cli.ffn_main",
                json.dumps(case.config(Role.FFN).to_additional_config()),
                str(case.ffn_model or case.model),
                *case.engine.flags(),
            ],
            "attention": [str(python), *command(case.model, output, case.engine, case.plan, extra)],
        }
        try:
            run_together(commands, env, folder)
        finally:
            left = end_marked(marker)
    if left:
        raise CaseFailed(f"processes were left behind: {left}; {tails(folder)}")
    new = leftovers() - before
    if new:
        raise CaseFailed(f"files were left behind: {sorted(new)}")
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


def marked(marker: str) -> list[psutil.Process]:
    """Every live process whose environment carries `marker`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def end_marked(marker: str, grace_s: float = 10.0) -> list[str]:
    """Wait for the processes of a case to be gone; kill and name those that are not."""
    deadline = time.monotonic() + grace_s
    while (left := marked(marker)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
    named = [f"{process.pid} {' '.join(process.cmdline())[:120]}" for process in left]
    for process in left:
        process.kill()
    return named


def leftovers() -> set[str]:
    """Shared memory and rendezvous files that no living process uses; other services on this host do not count."""
    files = [*_listed(Path("/dev/shm"), "*"), *_listed(Path("/tmp"), "vllm_dist_*")]  # noqa: S108
    used = _mapped() if files else ""
    return {file for file in files if file not in used}


def _mapped() -> str:
    """The memory maps of every process: shared memory and semaphores in use stand there by path."""
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue  # the process has ended
    return "".join(maps)


def _listed(folder: Path, pattern: str) -> Iterable[str]:
    return (str(path) for path in folder.glob(pattern)) if folder.is_dir() else ()


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
