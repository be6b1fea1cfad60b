# SPDX-License-Identifier: Apache-2.0
"""One service in the two-launcher form (`afd ffn`, `afd attention`), a fault, and what a client and a shell then see.

All processes are started by the real interpreter: here it matters who is whose parent and what a signal reaches.
"""

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType

import psutil

from afd_plugin.demo.engine import EngineArguments
from afd_plugin.errors import PortInUse
from afd_plugin.supervisor.ports import PortReservation
from afd_plugin.supervisor.processes import describe, members_of
from tests.e2e.harness import environment
from tests.e2e.services import flags
from tests.e2e.teardown import tolerated

BOUND_S = 10.0
"""The default bound of the product: from the fault to the client's error."""

START_TIMEOUT_S = 180.0
ENGINE = EngineArguments(max_model_len=4096)
LONG_PROMPT = "chaos " * 400
"""More than 2,000 tokens; at 64 a step its prefill takes tens of steps."""

DECODE_TOKENS = 1500
"""Enough for seconds of decoding: no answer is complete before the fault is over."""


class Victim(str, Enum):
    """A process of the service."""

    ATTENTION_LAUNCHER = "attention-launcher"
    HTTP = "http-server"
    ENGINE_CORE = "engine-core"
    ATTENTION_WORKER = "attention-worker"
    FFN_LAUNCHER = "ffn-launcher"
    FFN_HOST = "ffn-host"
    FFN_WORKER = "ffn-worker"


@dataclass
class Answer:
    """What became of one streamed request.

    `ended` is `complete` (every token asked for, and the closing line), `truncated` (a closing line without all of
    them and without an error), `error` (an HTTP error or an error in the stream), `reset` (the connection ended) or
    `hang` (nothing for `BOUND_S` and half as much again).
    """

    ended: str = "hang"
    detail: str = ""
    tokens: int = 0
    at: float = 0.0


class Client(threading.Thread):
    """Streams one completion; `started` is set when the first `after` tokens have come."""

    def __init__(
        self, port: int, prompt: str, max_tokens: int, after: int = 3, patience_s: float = BOUND_S * 1.5
    ) -> None:
        super().__init__(daemon=True)
        self._patience_s = patience_s
        self.answer = Answer()
        self.started = threading.Event()
        self._port = port
        self._after = after
        self._wanted = max_tokens
        self._body = json.dumps(
            {
                "model": "m",
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        )
        self.start()

    def run(self) -> None:
        """Send, read to the end, note how it ended."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._patience_s)
        try:
            connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                self.answer.ended, self.answer.detail = (
                    "error",
                    f"{response.status} {response.read()[:200]!r}",
                )
            else:
                self._read(response)
        except TimeoutError:
            self.answer.ended = "hang"
        except (OSError, http.client.HTTPException) as error:
            self.answer.ended, self.answer.detail = "reset", repr(error)
        finally:
            self.answer.at = time.monotonic()
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> None:
        error = ""
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data:"):
                continue
            content = line.removeprefix("data:").strip()
            if content == "[DONE]":
                full = self.answer.tokens == self._wanted
                self.answer.ended = "error" if error else "complete" if full else "truncated"
                self.answer.detail = error
                return
            chunk = json.loads(content)
            if "error" in chunk:
                error = str(chunk["error"])[:200]
                continue
            self.answer.tokens += len(chunk["choices"][0].get("token_ids") or ())
            if self.answer.tokens >= self._after:
                self.started.set()
        self.answer.ended, self.answer.detail = ("error", error) if error else ("reset", "the stream ended")

    def result(self) -> Answer:
        """The answer; a client that never ends is a hang."""
        self.join(BOUND_S * 12)
        return self.answer


@dataclass(frozen=True)
class Launcher:
    """One of the two commands and its log."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def last_line(self) -> str:
        """The last line a person at its terminal reads."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


@dataclass
class Aftermath:
    """What was seen from a fault on; seconds since the fault."""

    answers: list[Answer] = field(default_factory=list)
    answered_after: float = 0.0
    gone_after: float = 0.0
    left: list[str] = field(default_factory=list)
    exit_codes: tuple[int | None, int | None] = (None, None)
    last_lines: tuple[str, str] = ("", "")
    files: list[str] = field(default_factory=list)

    def row(self) -> str:
        """One line for a table."""
        ended = ",".join(sorted({answer.ended for answer in self.answers})) or "-"
        return (
            f"{ended} after {self.answered_after:.1f} s, gone after {self.gone_after:.1f} s, exit "
            f"attention {self.exit_codes[0]} ffn {self.exit_codes[1]}"
        )


class Deployment:
    """Both launchers; a context manager that leaves no process."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        ports: tuple[int, int],
        ffn_command: Sequence[str] = (),
        *,
        together: bool = False,
        options: Sequence[str] = (),
        engine_options: Sequence[str] = (),
        **env: str,
    ) -> None:
        """Start both at once. `ports` are those of the rendezvous and of HTTP; `ffn_command` replaces `afd ffn`.

        `together`: by one `afd serve`, which then is both launchers. Two launchers cannot tell a role that failed
        before they met from one that is late, so there only the rendezvous timeout bounds a start. `options` are
        further ones of `afd serve`, `engine_options` are vLLM's, of attention (`together`: of both roles).
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.rendezvous, self.http = ports
        self._env = environment({"AFD_TOKEN": "chaos", "TMPDIR": str(self.temporary), **env})
        self._sessions: set[int] = set()
        self._shared_memory: set[str] = set()
        self.began = time.monotonic()
        address = f"127.0.0.1:{self.rendezvous}"
        vllm = [str(model), "--served-model-name", "m", *flags(ENGINE)]
        afd = [sys.executable, "-m", "afd_plugin.cli"]
        if together:
            self.attention = self.ffn = self._launch(
                "serve", [*afd, "serve", "--port", str(self.http), *options, *vllm, *engine_options]
            )
            return
        self.ffn = self._launch("ffn", list(ffn_command) or [*afd, "ffn", "--listen", address, *vllm])
        self.attention = self._launch(
            "attention",
            [*afd, "attention", "--peer", address, "--port", str(self.http), *vllm, *engine_options],
        )

    def _launch(self, name: str, words: list[str]) -> Launcher:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._sessions.add(process.pid)
        return Launcher(process, log)

    def family(self) -> list[psutil.Process]:
        """Every living process of the service, found by session: vLLM's process titles overwrite environments."""
        found = members_of(self._sessions)
        for process in found:
            with contextlib.suppress(OSError):
                self._sessions.add(os.getsid(process.pid))
        return found

    def end_family(self) -> list[str]:
        """Kill and name whatever is left."""
        left = self.family()
        named = [describe(process) for process in left]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return named

    def __enter__(self) -> "Deployment":
        """The deployment; it may still be starting."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill whatever is left."""
        self.end_family()
        for launcher in (self.attention, self.ffn):
            launcher.process.wait(timeout=10)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def await_ready(self) -> float:
        """Wait until HTTP is healthy; the seconds since the start."""
        self._await(self._healthy, "the service is not ready")
        self._note_shared_memory()
        return time.monotonic() - self.began

    def _healthy(self) -> bool:
        for launcher in (self.attention, self.ffn):
            if launcher.process.poll() is not None:
                raise AssertionError(f"a launcher ended during start-up: {self.tails()}")
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def find(self, victim: Victim) -> psutil.Process:
        """The process; waits for it during start-up."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [process for process in self.family() if self._is(process, victim)]
            return len(found) == 1

        self._await(look, f"there is no {victim.value}")
        self._note_shared_memory()
        return found[0]

    def _note_shared_memory(self) -> None:
        for process in self.family():
            with contextlib.suppress(OSError):  # it has just ended
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
                paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/dev/shm/" in line}  # noqa: S108
                self._shared_memory |= {path.removesuffix(" (deleted)") for path in paths}

    def _is(self, process: psutil.Process, victim: Victim) -> bool:
        if victim is Victim.ATTENTION_LAUNCHER:
            return process.pid == self.attention.process.pid
        if victim is Victim.FFN_LAUNCHER:
            return process.pid == self.ffn.process.pid
        try:
            words = process.cmdline()
            parent = " ".join(process.parent().cmdline()) if process.parent() else ""
        except psutil.NoSuchProcess:
            return False
        if victim is Victim.HTTP:
            return "afd_plugin.cli.attention_main" in words
        if victim is Victim.FFN_HOST:
            return "afd_plugin.cli.ffn_main" in words
        name = words[0] if words else ""
        if victim is Victim.ENGINE_CORE:
            return name.startswith("VLLM::EngineCore")
        below = "EngineCore" in parent
        return name.startswith("VLLM::Worker") and below is (victim is Victim.ATTENTION_WORKER)

    def _await(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{complaint} after {START_TIMEOUT_S:.0f} s: {self.tails()}")
            time.sleep(0.05)

    def pause_until(self, moment: float) -> None:
        """Let the service run until `moment` seconds after its start."""
        # lint: allow sleeping: a stretch of time in which nothing happens is what is wanted
        time.sleep(max(0.0, self.began + moment - time.monotonic()))

    def watch(self, fault_at: float, clients: Sequence[Client], gone_bound_s: float) -> Aftermath:
        """Collect the answers and wait for the end of every process, for at most `gone_bound_s` after the fault."""
        seen = Aftermath()
        seen.answers = [client.result() for client in clients]
        seen.answered_after = max((answer.at - fault_at for answer in seen.answers), default=0.0)
        while self.family() and time.monotonic() - fault_at < gone_bound_s:
            self.attention.process.poll()
            self.ffn.process.poll()
            time.sleep(0.1)
        seen.gone_after = time.monotonic() - fault_at
        seen.left = self.end_family()
        launchers = (self.attention, self.ffn)
        seen.exit_codes = tuple(launcher.process.wait(timeout=5) for launcher in launchers)  # type: ignore[assignment]
        seen.last_lines = tuple(launcher.last_line() for launcher in launchers)  # type: ignore[assignment]
        seen.files = self.remains()
        return seen

    def remains(self) -> list[str]:
        """Temporary files, and shared memory that processes of this service were seen to map."""
        files = [path.name for path in self.temporary.iterdir() if not tolerated(path)]
        return sorted(files) + sorted(path for path in self._shared_memory if Path(path).exists())

    def stop(self) -> tuple[int, int]:
        """A clean stop of attention, which ends the FFN; the exit codes."""
        self.attention.process.send_signal(signal.SIGTERM)
        return self.attention.process.wait(timeout=60), self.ffn.process.wait(timeout=60)

    def tails(self, lines: int = 25) -> str:
        """The ends of both logs."""
        shown = []
        for launcher in (self.attention, self.ffn):
            text = launcher.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
            shown.append(f"--- {launcher.log}\n" + "\n".join(text))
        return "\n".join(shown)


def strike(process: psutil.Process, number: signal.Signals) -> float:
    """Send a signal; returns the moment."""
    os.kill(process.pid, number)
    return time.monotonic()


def two_ports() -> tuple[int, int]:
    """Two ports that were free a moment ago; every case of a session uses the same two.

    They lie below the range from which the system gives ports to outgoing connections: one of those took a port of the
    first kind between two cases, and the next start found it in use.
    """
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
    found: list[int] = []
    while len(found) < 2:
        port = random.randrange(10_000, int(limits.split()[0]))
        with contextlib.suppress(PortInUse), PortReservation(port=port):
            found.append(port)
    return found[0], found[1]
