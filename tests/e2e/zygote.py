# SPDX-License-Identifier: Apache-2.0
"""Starts many vLLM processes for the price of one import.

Importing vLLM takes about ten seconds of a core, and one AFD case is four processes. A zygote imports it
once and forks for every start; `Zygote.python` is an executable that can be used wherever `python` would be
(`subprocess`, `sys.executable`, the executable of multiprocessing's spawn), so launchers, engines and
spawned workers all go through it without knowing.

What is real: the program, its arguments, environment, descriptors, spawn protocol, sockets and shared
memory. What is not: the interpreter's start-up and the end of its modules, and the process tree (the pid a
parent sees is a small process that forwards signals and the exit status). Tests of life cycle, kills and
process trees must use the real interpreter.
"""

import atexit
import contextlib
import fcntl
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from tests.e2e.handover import HEADER, STATUS, receive_exactly

PRELOADED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.attention.backends.cpu_attn",
)
"""Modules imported before forking. None of ours: a fork sees this project's code as a fresh start would."""

START_TIMEOUT_S = 180.0
_FIRST_FREE_DESCRIPTOR = 512


class Zygote:
    """A context manager that owns the zygote process and the `python` stand-in that asks it for forks.

    Every process it forked and that still runs is killed when the context ends.
    """

    def __init__(self, environment: Mapping[str, str], preloaded: Sequence[str] = PRELOADED) -> None:
        """`environment` is what vLLM is imported with; a start's own environment replaces it afterwards."""
        self._preloaded = tuple(preloaded)
        self._environment = dict(environment)
        self._folder = tempfile.TemporaryDirectory(prefix="zygote-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def python(self) -> Path:
        """The executable to start processes with."""
        return Path(self._folder.name) / "python"

    def __enter__(self) -> "Zygote":
        """Start the zygote and wait until it has imported vLLM."""
        address = Path(self._folder.name) / "socket"
        handover = Path(__file__).with_name("handover.py")
        words = [sys.executable, "-IS", str(handover), str(address), sys.executable]
        self.python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        self.python.chmod(0o755)
        command = [sys.executable, "-m", "tests.e2e.zygote", str(address), str(self.python), *self._preloaded]
        root = Path(__file__).parents[2]
        # pyarrow, which transformers imports where it is installed, would start a thread of its allocator
        quiet = {**self._environment, "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        self._process = subprocess.Popen(command, env=quiet, cwd=root, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address.exists():
            if self._process.poll() is not None:
                raise RuntimeError(f"the zygote ended with {self._process.returncode} while importing vLLM")
            if time.monotonic() > deadline:
                self._process.kill()
                raise TimeoutError(f"the zygote did not import vLLM within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the zygote and all that it forked."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
        self._folder.cleanup()


@dataclass(frozen=True)
class Start:
    """One start as the stand-in asked for it, in the fork that will run it."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: dict[int, int]
    """The number a descriptor must have, and the one it has now."""


def receive_start(connection: socket.socket) -> Start:
    """Read what `handover.request` sent."""
    length, count = HEADER.unpack(receive_exactly(connection, HEADER.size))
    content: dict[str, Any] = json.loads(receive_exactly(connection, length))
    received: list[int] = []
    while len(received) < count:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 64)
        if not data:
            raise ConnectionError("a start was cut off")
        received += descriptors
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, _FIRST_FREE_DESCRIPTOR) for number in received]
    for number in received:
        os.close(number)
    descriptors = dict(zip(content.pop("descriptors"), high, strict=True))
    return Start(**content, descriptors=descriptors)


class Server:
    """The loop of the zygote: forks for each connection, forwards signals, answers with the exit status."""

    def __init__(self, address: str) -> None:
        """Listen at `address`; the file appears only once everything is imported."""
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, tuple[int, socket.socket]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{address}.new")
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)
        os.rename(f"{address}.new", address)

    def serve(self) -> Start:
        """Serve until killed; returns only in a fork, with the start that the fork is to run."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    start = self._fork()
                    if start is not None:
                        return start
                elif key.data[0] == "process":
                    self._finish(key.fd)
                else:
                    self._forward(key.fileobj, key.data[1])  # type: ignore[arg-type]

    def kill_all(self) -> None:
        """Kill everything that still runs."""
        for pid, _ in self._running.values():
            os.kill(pid, signal.SIGKILL)

    def _fork(self) -> Start | None:
        connection, _ = self._listener.accept()
        try:
            start = receive_start(connection)
        except (ConnectionError, OSError, ValueError) as error:
            print(f"zygote: refused a start: {error}", file=sys.stderr)
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            return start
        for number in start.descriptors.values():
            os.close(number)
        process = os.pidfd_open(pid)
        self._running[process] = (pid, connection)
        self._selector.register(process, selectors.EVENT_READ, ("process", process))
        self._selector.register(connection, selectors.EVENT_READ, ("connection", process))
        return None

    def _forward(self, connection: socket.socket, process: int) -> None:
        pid, _ = self._running[process]
        try:
            signals = connection.recv(16)
        except ConnectionError:
            signals = b""
        if not signals:
            self._selector.unregister(connection)
            os.kill(pid, signal.SIGKILL)  # the stand-in was killed
        for number in signals:
            os.kill(pid, number)

    def _finish(self, process: int) -> None:
        pid, connection = self._running.pop(process)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(process)
        os.close(process)
        try:
            connection.sendall(STATUS.pack(status))
            self._selector.unregister(connection)
        except (ConnectionError, KeyError):
            pass  # the stand-in has gone already: nobody asks for the status
        connection.close()


def become(start: Start, python: str) -> None:
    """Make this fork the process that was asked for: descriptors, environment, folder, executable."""
    os.setpgid(0, 0)
    os.closerange(3, _FIRST_FREE_DESCRIPTOR)
    for wanted, number in start.descriptors.items():
        os.dup2(number, wanted)
        os.close(number)
    os.environ.clear()
    os.environ.update(start.environment)
    added = [name for name in start.environment.get("PYTHONPATH", "").split(os.pathsep) if name]
    sys.path[1:1] = [name for name in added if name not in sys.path]
    os.chdir(start.folder)
    tempfile.tempdir = None  # the zygote's own choice, made from its own environment
    sys.executable = python
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    import multiprocessing

    multiprocessing.set_executable(python)


def run(arguments: list[str]) -> None:
    """Run `python ARGUMENTS...`: options are ignored up to `-m MODULE` or `-c CODE`."""
    while arguments:
        option, *rest = arguments
        if option in {"-X", "-W"}:
            arguments = rest[1:]
        elif option == "-m":
            sys.argv = [rest[0], *rest[1:]]
            sys.path[0] = os.getcwd()
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            return
        elif option == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path[0] = ""
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
            return
        else:
            arguments = rest
    raise ValueError("a start without -m or -c reached the zygote")


def end(program: Callable[[], None]) -> NoReturn:
    """Run `program` and end the process as the interpreter would, but for the destruction of every module.

    That takes seconds of a core in each of a dozen forks of vLLM, since it writes to all memory they share. Threads are
    joined, exit handlers run, output is flushed; what remains is the system's to free.
    """
    status = 0
    try:
        program()
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 (the outermost frame)
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for path in static_shared_memory():
        path.unlink(missing_ok=True)
    os._exit(status & 0xFF)


def static_shared_memory() -> list[Path]:
    """Shared memory of this process that vLLM's C++ code removes in a static destructor, which `os._exit` skips."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return [Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line and "-cpushm_" in line]  # noqa: S108


def main() -> None:
    """`python -m tests.e2e.zygote SOCKET PYTHON MODULES`: import, serve; a fork runs its program."""
    address, python, *preloaded = sys.argv[1:]
    import gc

    for name in preloaded:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"importing {preloaded} left {threads} threads; a fork would lose all but one")
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    server = Server(address)

    def stop(number: int, frame: object) -> None:
        server.kill_all()
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    start = server.serve()
    if os.getpid() == parent:
        raise RuntimeError("the zygote left its loop")
    become(start, python)
    end(lambda: run(start.arguments))


if __name__ == "__main__":
    main()
