# SPDX-License-Identifier: Apache-2.0
"""Native engines and AFD pairs as bounded child processes that take commands; see
:mod:`qualify.gpu.engine_child`.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from afd_plugin.supervisor.processes import end_all, wait_gone
from qualify.gpu.engine_child import MARK

ENVIRONMENT: Mapping[str, str] = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Of every process of a comparison. The sampler of FlashInfer would compile itself for minutes on a fresh host. NVLink
multicast is left off everywhere: a process that dies with it can take a host's GPUs along.
"""


ENDING_S = 5.0
"""How long a child of a failed comparison may take to end by itself, and after SIGTERM again. What is killed at once
leaves semaphores in shared memory behind.
"""


class EngineError(RuntimeError):
    """A child did not come up, died, or was late; the message ends with the tail of its log."""


class Engine:
    """One child that serves commands; ``companions`` are FFN processes that live and end with it."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        logs: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self.companions: list[Companion] = []
        self._sink = self.log.open("w")
        self._answers: queue.Queue[Any] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "qualify.gpu.engine_child", json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **ENVIRONMENT, **(environment or {})}, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream: IO[str] | None = self._process.stdout
        for line in stream or ():
            if line.startswith(MARK):
                self._answers.put(json.loads(line[len(MARK) :]))
            else:
                self._sink.write(line)
                self._sink.flush()
        self._answers.put(EngineError("ended"))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(graceful=error is None)

    @property
    def process(self) -> subprocess.Popen[str]:
        """The child."""
        return self._process

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self, timeout_s: float) -> Any:
        """The next answer. A child that ends is noticed although what it started may hold its output open."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self._process.poll() is not None
            try:
                content = self._answers.get(timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                if ended:
                    content = EngineError("ended")
                elif time.monotonic() < deadline:
                    continue
                else:
                    said = f"{self.name} gave no answer within {timeout_s:g} s\n{self.tails()}"
                    raise EngineError(said) from None
            if isinstance(content, EngineError):
                raise EngineError(f"{self.name} ended with {self._process.poll()}\n{self.tails()}")
            return content

    def ask(self, timeout_s: float, do: str, **command: Any) -> Any:
        """Send one command and return its answer."""
        self.tell(do, **command)
        return self.receive(timeout_s)

    def tell(self, do: str, **command: Any) -> None:
        """Send one command; the answer is fetched by :meth:`receive`."""
        if self._process.stdin is None:
            raise EngineError(f"{self.name} has no input")
        try:
            self._process.stdin.write(json.dumps({"do": do, **command}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"{self.name} is gone\n{self.tails()}") from None

    def tails(self) -> str:
        """The ends of all logs."""
        parts = [tail(self.log), *(tail(companion.log) for companion in self.companions)]
        return "\n".join(parts)

    def close(self, graceful: bool = True, timeout_s: float = 60.0) -> dict[str, int | None]:
        """End everything; returns exit codes by name. What does not end by itself in time is killed."""
        if graceful and self._process.poll() is None:
            try:
                self.tell("stop")
            except EngineError:
                graceful = False
        codes = {self.name: _ended(self._process, timeout_s if graceful else ENDING_S)}
        for companion in self.companions:
            codes[companion.name] = _ended(companion.process, timeout_s if graceful else ENDING_S)
        self._reader.join(10)
        for stream in (self._process.stdin, self._process.stdout, self._sink):
            if stream is not None:
                with suppress(BrokenPipeError):  # of a child that is gone with a command unread
                    stream.close()
        return codes


class Companion:
    """An FFN process."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **environment}, start_new_session=True,
            )  # fmt: skip


def _ended(process: subprocess.Popen[Any], timeout_s: float) -> int | None:
    """The exit code of a child that ended by itself in time, else None; nothing of its session outlives this."""
    try:
        code: int | None = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    if not wait_gone((process.pid,), 0.0):
        end_all((process.pid,), ENDING_S)
        process.wait(10)
    return code


VISIBLE = "CUDA_VISIBLE_DEVICES"
TWO_GPUS = ("0,1", "1,0")
"""Attention on the first GPU and the FFN on the second. Each sees both, or neither could map the other's arena."""


def native(
    name: str,
    model: Path,
    engine: Mapping[str, Any],
    logs: Path,
    environment: Mapping[str, str] | None = None,
) -> Engine:
    """A native engine with the V1 runner and the multiprocessing executor, as the AFD roles have."""
    arguments = {"model": str(model), "distributed_executor_backend": "mp", **engine}
    return Engine(name, arguments, logs, environment)


def pair(
    name: str,
    model: Path,
    engine: Mapping[str, Any],
    logs: Path,
    gate: str = "ffn",
    dense: str = "attention",
    device: str = "cuda",
    connector: str = "CudaIpcAFDConnector",
    microbatches: int = 1,
    environment: Mapping[str, str] | None = None,
    visible: tuple[str, str] | None = None,
    shards: int = 1,
    shared: str = "ffn",
) -> Engine:
    """One attention engine and one FFN process that serve the same model as ``native`` would.

    ``visible`` are the GPUs of attention and of the FFN, each role's own first; None shares what there is. With
    ``shards`` the experts are split over so many FFN processes.
    """
    (attention,) = service(
        name, model, engine, logs, gate, dense, device, connector, microbatches, environment, visible, shards=shards,
        shared=shared,
    )  # fmt: skip
    return attention


def service(
    name: str,
    model: Path,
    engine: Mapping[str, Any],
    logs: Path,
    gate: str = "ffn",
    dense: str = "attention",
    device: str = "cuda",
    connector: str = "CudaIpcAFDConnector",
    microbatches: int = 1,
    environment: Mapping[str, str] | None = None,
    visible: tuple[str, str] | None = None,
    shards: int = 1,
    lanes: int = 1,
    shared: str = "ffn",
    attention_tp: int = 1,
) -> list[Engine]:
    """``lanes`` attention engines of their own and ``shards`` FFN processes; the first engine's close ends the FFN.

    The first engine has the FFN processes as companions.
    """
    eyes = [{VISIBLE: names} for names in visible] if visible else [{}, {}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    reports = logs / f"{name}-reports"
    reports.mkdir(exist_ok=True)
    link = {"AFD_TOKEN": secrets.token_hex(16), "AFD_ROLE_REPORT_DIR": str(reports), **(environment or {})}
    afd: dict[str, Any] = {"gate": gate, "dense": dense, "connector": connector, "microbatches": microbatches}
    afd |= {"shared": shared, "attention_tp": attention_tp}
    if shards > 1:
        afd["ffn_shards"] = shards
    if lanes > 1:
        afd |= {"attention_dp": lanes, "independent_lanes": True}
    prefix = "CPUAFD" if device == "cpu" else "AFD"
    module = "cpu_attention_worker" if device == "cpu" else "attention_worker"
    engines = [
        Engine(
            name if not lane else f"{name}-lane{lane}",
            {
                "model": str(model),
                "distributed_executor_backend": "mp",
                **engine,
                "tensor_parallel_size": attention_tp,
                "worker_cls": f"afd_plugin.v1.worker.{module}.{prefix}AttentionWorker",
                "additional_config": {"afd": {"role": "attention", "member": lane, **afd}},
            },
            logs,
            {**link, **eyes[0], "AFD_PEER": address},
        )
        for lane in range(lanes)
    ]
    for shard in range(shards):
        own = {"role": "ffn", "member": shard, **afd}
        command = [
            sys.executable,
            "-m",
            "afd_plugin.cli.ffn_main",
            json.dumps(own),
            str(model),
            *flags(engine),
        ]
        label = f"{name}-ffn" if not shard else f"{name}-ffn{shard}"
        engines[0].companions.append(
            Companion(label, command, logs / f"{label}.log", {**link, **eyes[1], "AFD_LISTEN": address})
        )
    return engines


def role_report(logs: Path, name: str, role: str, member: int = 0) -> dict[str, Any]:
    """What a worker of the service ``name`` wrote when it ended; empty when it did not."""
    path = logs / f"{name}-reports" / f"{role}-{member}-0.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    content.pop("tensor_names", None)
    return content


def flags(engine: Mapping[str, Any]) -> list[str]:
    """Engine arguments as vLLM's command-line options."""
    words: list[str] = []
    for name, value in engine.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


def tail(path: Path, lines: int = 25) -> str:
    """The end of a log, with its name."""
    text = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return "\n".join([f"--- {path.name}", *text[-lines:]])


def wait_all(engines: Sequence[Engine], timeout_s: float) -> dict[str, float]:
    """Wait until every engine is ready; seconds by name."""
    deadline = time.monotonic() + timeout_s
    return {
        engine.name: engine.receive(max(1.0, deadline - time.monotonic()))["ready_s"] for engine in engines
    }
