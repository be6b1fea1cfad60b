# SPDX-License-Identifier: Apache-2.0
"""What every end-to-end test holds a service to when it is over: nothing of it is left, and nothing had to be killed.

Looked at are processes (by a mark in their environment, whoever their parent is by then), the ports they listened on,
shared memory that they mapped, and temporary files: each case has a folder of its own for these, which must be empty
in the end. A line in a log that says that a process was ended by force fails the case as well.
"""

import re
import secrets
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import psutil

MARKER = "AFD_E2E_CASE"
"""Every process of a case carries it in its environment."""

TITLE_PREFIX = "VLLM_PROCESS_NAME_PREFIX"
"""vLLM's variable for what its process titles begin with. A title overwrites the environment that others see, so the
mark is part of it.
"""

FORCE = re.compile(r"SIGKILL|force killing")
"""What the supervisor and vLLM's executors and process managers write when they end a process by force."""

MANAGER = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d) .*\[shutdown\] Process manager: ")
AT_ONCE = timedelta(seconds=2)

WATCH_S = 2.0
"""How often a case's processes are looked at while it runs."""

GRACE_S = 10.0
"""How long the last processes of a case may take to be gone."""

CACHES = ("torchinductor_*", "torch_compile_debug")
"""Folders that torch keeps in the temporary folder on purpose."""


class CaseFailed(AssertionError):
    """A process of a case failed, hung or left something behind; the sentence says what, or quotes the logs."""


class Traces:
    """What one case may leave behind. `environment` must be in the environment of all its processes."""

    def __init__(self) -> None:
        self.marker = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="afd-"))
        self.environment = {
            MARKER: self.marker,
            TITLE_PREFIX: f"VLLM-{self.marker}",
            "TMPDIR": str(self.folder),
        }
        self._shared_memory: set[str] = set()
        self._ports: set[tuple[str, int]] = set()

    def note(self) -> None:
        """Remember the ports that the case's processes listen on now, and the shared memory that they map."""
        for process in marked(self.marker):
            try:
                connections = process.net_connections("inet")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._ports |= {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}
            self._shared_memory |= set(mapped(Path(f"/proc/{process.pid}/maps")))

    def found(self, logs: Path | None = None) -> list[str]:
        """End what still runs, and say what was left or needed force: one sentence each."""
        faults = [f"the process {named} was left" for named in end_marked(self.marker)]
        listening = {one.laddr for one in psutil.net_connections("inet") if one.status == psutil.CONN_LISTEN}
        faults += [f"{host}:{port} is still listened on" for host, port in sorted(self._ports & listening)]
        orphans = {path for path in self._shared_memory if Path(path).exists()}
        faults += [
            f"the shared memory {path} was left" for path in sorted(orphans - in_use() if orphans else ())
        ]
        faults += [f"the temporary file {path.name} was left" for path in self._files()]
        for log in sorted(logs.glob("*.log")) if logs else ():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            faults += [f"{log.name} says: {line.strip()}" for line in forced(lines)]
        return faults

    def remove(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if not tolerated(path))


def forced(lines: Iterable[str]) -> Iterator[str]:
    """The lines that say that a process was ended by force.

    vLLM's process manager learns of a process's end in two threads at once, and the one that comes second is told
    nothing and takes it for alive. It says "force killing" then as well, but right after its SIGTERM and not after its
    grace of at least 5 s, and there is nobody left to kill.
    """
    asked: datetime | None = None
    for line in lines:
        manager = MANAGER.search(line)
        at = datetime.strptime(f"2000-{manager[1]} +0000", "%Y-%m-%d %H:%M:%S %z") if manager else None
        if at is not None and "send sigterm" in line:
            asked = at
        elif FORCE.search(line) and not (at and asked and timedelta() <= at - asked < AT_ONCE):
            yield line


def tolerated(path: Path) -> bool:
    """Whether a file directly in a case's temporary folder is torch's cache or the socket of a message queue of vLLM's.

    A queue's socket is called by a UUID. A process that is ended by force does not unlink its own, nor does a fork of
    the zygote; a service under `afd` has a folder of its own that goes as a whole.
    """
    if path.is_socket():
        try:
            uuid.UUID(path.name)
        except ValueError:
            return False
        return True
    return any(path.match(pattern) for pattern in CACHES)


@contextmanager
def nothing_left(logs: Path | None = None) -> Iterator[Traces]:
    """A case: what it is made of must be gone when the block ends; `CaseFailed` says what is not.

    Args:
        logs: folder of the case's logs (`*.log`), which are searched for a process that was ended by force.
    """
    traces = Traces()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            traces.note()

    watcher = threading.Thread(target=watch, name="traces", daemon=True)
    watcher.start()
    try:
        try:
            yield traces
        except BaseException:
            end_marked(traces.marker)  # the case's own failure is the one to tell
            raise
        faults = traces.found(logs)
        if faults:
            raise CaseFailed("; ".join(faults))
    finally:
        over.set()
        watcher.join(GRACE_S)
        traces.remove()


def marked(marker: str) -> list[psutil.Process]:
    """Every live process whose environment or vLLM title carries `marker`."""
    found = []
    for process in psutil.process_iter():
        try:
            titled = any(word.startswith(f"VLLM-{marker}::") for word in process.cmdline()[:1])
            ours = titled or process.environ().get(MARKER) == marker
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def end_marked(marker: str) -> list[str]:
    """Wait for the processes of a case to be gone; kill and name those that are not."""
    deadline = time.monotonic() + GRACE_S
    while (left := marked(marker)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
    named = []
    for process in left:
        with suppress(psutil.NoSuchProcess):  # it has ended at last
            words = " ".join(process.cmdline())[:120]
            process.kill()
            named.append(f"{process.pid} {words}")
    return named


def in_use() -> set[str]:
    """Shared memory that some live process maps."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        found |= set(mapped(maps))
    return found


def mapped(maps: Path) -> Iterable[str]:
    """The files of shared memory in one process's memory map, as long as they have their names."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # the process has ended, or is not ours
        return ()
    paths = (line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line)  # noqa: S108
    return (path for path in paths if not path.endswith(" (deleted)"))
