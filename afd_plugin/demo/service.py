# SPDX-License-Identifier: Apache-2.0
"""Starts, awaits and ends one server of the demo: native vLLM, or AFD through `afd serve`."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from afd_plugin.demo.client import Endpoint
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.errors import AFDError
from afd_plugin.supervisor.ports import PortReservation
from afd_plugin.supervisor.processes import end_all, wait_gone

HOST = "127.0.0.1"
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.25
_LOG_LINES_SHOWN = 25

Command = Callable[[Path, str, int, EngineArguments], list[str]]
"""Checkpoint folder, served name, port and engine arguments to a command line."""


class ServiceError(AFDError):
    """A server of the demo did not start, ended too early or did not stop; the end of its log is quoted."""

    name = "demo-service-failed"
    mend = "The end of the server's log is quoted; the whole log lies where the sentence says."


def native_command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
    """vLLM's own OpenAI server."""
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    parallel = [
        "--distributed-executor-backend",
        "mp",
        "--tensor-parallel-size",
        str(engine.tensor_parallel_size),
    ]
    return [*server, *parallel, *_common_flags(name, port, engine)]


def afd_command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
    """`afd serve` with one attention and one FFN process of the same tensor parallel size."""
    size = str(engine.tensor_parallel_size)
    server = [sys.executable, "-m", "afd_plugin.cli", "serve", str(model)]
    return [*server, "--attention-tp", size, "--ffn-tp", size, *_common_flags(name, port, engine)]


def _common_flags(name: str, port: int, engine: EngineArguments) -> list[str]:
    return ["--host", HOST, "--port", str(port), "--served-model-name", name, *engine.serving_flags()]


class Service:
    """One running server with its log file; a context manager that leaves no process behind."""

    def __init__(
        self,
        command: Command,
        model: Path,
        name: str,
        engine: EngineArguments,
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Start the server at once with exactly `environment`; its log and role reports go to `folder`."""
        folder.mkdir(parents=True)
        self.folder = folder
        self.log = folder / "server.log"
        self._reservation = PortReservation(HOST)
        self.endpoint = Endpoint(HOST, self._reservation.port, name)
        self._started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command(model, name, self.endpoint.port, engine),
                env={**environment, "AFD_ROLE_REPORT_DIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Service":
        """The service itself; it may still be starting."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process of the server."""
        self._reservation.close()
        end_all([self._process.pid], terminate=5.0)
        self._process.wait(timeout=STOP_TIMEOUT_S)

    def await_ready(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait until the server is healthy; returns the seconds since its start."""
        while not self.endpoint.healthy():
            if self._process.poll() is not None:
                raise ServiceError(
                    f"the server ended with {self._process.returncode} before it served; {self.tail()}"
                )
            if time.monotonic() - self._started > timeout_s:
                raise ServiceError(f"the server was not ready after {timeout_s:.0f} s; {self.tail()}")
            time.sleep(_POLL_S)
        self._reservation.close()
        return time.monotonic() - self._started

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ask the server to end (SIGTERM) and return its exit status; ServiceError when it does not."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ServiceError(f"the server did not end within {timeout_s:.0f} s; {self.tail()}") from None
        if not wait_gone([self._process.pid], 10.0):
            raise ServiceError(f"the server ended but left processes behind; {self.tail()}")
        return status

    def role_reports(self) -> dict[str, dict[str, Any]]:
        """What each worker reported about itself (bytes held and read, exchanges), by worker name."""
        return {
            path.stem: json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(self.folder.glob("*.json"))
        }

    def tail(self, count: int = _LOG_LINES_SHOWN) -> str:
        """Where the log is, and its last lines."""
        lines: Sequence[str] = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"log: {self.log}\n" + "\n".join(lines[-count:])
