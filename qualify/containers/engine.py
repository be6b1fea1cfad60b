# SPDX-License-Identifier: Apache-2.0
"""A container engine: the host's, or one of our own that ends with this process.

Our own (`--engine own`) needs root and `dockerd` (Debian: docker.io). It has its own data root, socket, pid file and
containerd namespace, no bridge and no firewall rules: builds use the host's network, containers none. It gets SIGTERM
when the process that started it dies, even by SIGKILL, and what such a death leaves is cleared at the next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
from docker.errors import DockerException
from requests.exceptions import RequestException

from qualify.environment import cells_directory, locked
from qualify.process import CommandError, capture, tail, write_atomically

START_S = 60.0
STOP_S = 60.0
DISCARD_S = 180.0
LONGEST_S = 5400.0
"""The longest silence of a container that a reader of its output waits through."""

API = "1.41"
"""The interface that Debian 12's engine speaks and newer ones still do."""

_OWNER = "owner.json"


class EngineError(RuntimeError):
    """Something cannot be done with an engine; the message says what was seen and what mends it."""


class NoEngine(EngineError):
    """This host has no engine and none can be started on it, which says nothing about the cell or its image."""


@dataclass(frozen=True)
class Engine:
    """A running engine: the SDK's client, and the address that the command-line client is given."""

    client: docker.DockerClient
    host: str

    def cli(self, *arguments: str) -> list[str]:
        """A command of the command-line client that speaks to this engine."""
        return [builder_cli(), "--host", self.host, *arguments]


@contextlib.contextmanager
def opened(choice: str, data: Path | None = None) -> Iterator[Engine]:
    """The `host`'s engine (DOCKER_HOST, else the default socket), or our `own`, which ends with the context."""
    if choice == "own":
        with _own(data or data_root()) as engine:
            yield engine
        return
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    with contextlib.closing(_client(host)) as client:
        yield Engine(client, host)


def _client(host: str) -> docker.DockerClient:
    """A client of an engine that answers; EngineError when none does."""
    mend = "start one, set DOCKER_HOST, or use `--engine own` as root"
    path = host.removeprefix("unix://")
    try:
        if path != host:  # asked before the SDK, which forgets a socket that does not connect
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(5.0)
                probe.connect(path)
        client = docker.DockerClient(base_url=host, version=API, timeout=int(LONGEST_S))
    except (OSError, DockerException) as error:
        raise NoEngine(f"no engine answers at {host}: {mend} ({error})") from error
    try:
        client.ping()
    except (DockerException, RequestException) as error:
        client.close()
        raise NoEngine(f"no engine answers at {host}: {mend} ({error})") from error
    return client


def data_root() -> Path:
    """Where our own engine keeps images: AFD_ENGINE_DIR, else beside the cells in the user's cache."""
    chosen = os.environ.get("AFD_ENGINE_DIR")
    return Path(chosen).absolute() if chosen else cells_directory().parent / "engine"


def builder_cli() -> str:
    """The first `docker` on PATH that can build with secrets: it has buildx, or is older than release 23."""
    seen = []
    for folder in os.get_exec_path():
        found = shutil.which("docker", path=folder)
        if found is None:
            continue
        if capture([found, "buildx", "version"], check=False).returncode == 0:
            return found
        release = capture([found, "--version"]).stdout.split("version ")[-1].split(",")[0]
        if int(release.split(".")[0]) < 23:  # these carry the builder's client themselves
            return found
        seen.append(f"{found} {release} lacks buildx")
    raise EngineError(
        f"no `docker` command that can build with secrets ({'; '.join(seen) or 'none at all'}): install docker.io, "
        "or docker-buildx beside a newer one"
    )


@contextlib.contextmanager
def _own(data: Path) -> Iterator[Engine]:
    daemon = shutil.which("dockerd")
    if daemon is None:
        raise NoEngine("there is no dockerd: install it (Debian: apt-get install docker.io)")
    if os.geteuid() != 0:
        raise NoEngine("an engine of our own needs root: use the host's (`--engine host`)")
    data.mkdir(parents=True, exist_ok=True)
    with locked(data / "lock"):
        clear(data)
        folder = Path(tempfile.mkdtemp(prefix="afd-engine-"))
        process = _start(daemon, data, folder)
        try:
            write_atomically(data / _OWNER, json.dumps({"pid": process.pid, "folder": str(folder)}))
            host = f"unix://{folder}/socket"
            with contextlib.closing(_await(host, process, folder)) as client:
                yield Engine(client, host)
        finally:
            _end(psutil.Process(process.pid) if process.poll() is None else None)
            process.wait(timeout=STOP_S)
            clear(data)


def discard(data: Path | None = None) -> Path:
    """End our own engine if a driver has left it, and remove its data root: images, containers, everything.

    Waits for a driver that is still leaving; SetupError when it does not leave in DISCARD_S.
    """
    data = data or data_root()
    if data.is_dir():
        with locked(data / "lock", DISCARD_S):
            clear(data)
            shutil.rmtree(data)
    return data


def _start(daemon: str, data: Path, folder: Path) -> subprocess.Popen[bytes]:
    (folder / "daemon.json").write_text("{}", encoding="utf-8")  # the host's settings are not ours
    words = ["setpriv", "--pdeathsig", "TERM", daemon, "--config-file", str(folder / "daemon.json")]
    words += ["--data-root", str(data / "data"), "--exec-root", str(folder / "exec")]
    words += ["--host", f"unix://{folder}/socket", "--pidfile", str(folder / "pid")]
    words += ["--bridge", "none", "--iptables=false", "--ip6tables=false"]
    words += ["--containerd-namespace", "afd", "--containerd-plugins-namespace", "afd-plugins"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _await(host: str, process: subprocess.Popen[bytes], folder: Path) -> docker.DockerClient:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        if (folder / "socket").exists():
            with contextlib.suppress(EngineError):
                return _client(host)
        time.sleep(0.2)
    said = tail((folder / "log").read_text(encoding="utf-8", errors="replace"), 5)
    ended = (
        f"ended with {process.returncode}"
        if process.poll() is not None
        else f"did not serve in {START_S:g} s"
    )
    raise NoEngine(f"our own dockerd {ended}:\n{said}")


def clear(data: Path) -> None:
    """End what an earlier owner of this data root has left, by its recorded number: process, mounts, folder.

    Called under the data root's lock: whoever wrote the record is gone.
    """
    record = data / _OWNER
    if not record.is_file():
        return
    owner = json.loads(record.read_text(encoding="utf-8"))
    folder = Path(owner["folder"])
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(owner["pid"])
        if str(folder) in " ".join(process.cmdline()):  # else the number is someone else's by now
            _end(process)
    for mounted in reversed(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()):
        target = mounted.split()[1]
        if Path(target).is_relative_to(folder) or Path(target).is_relative_to(data.absolute()):
            with contextlib.suppress(CommandError):
                capture(["umount", "--lazy", target])
    shutil.rmtree(folder, ignore_errors=True)
    record.unlink()


def _end(process: psutil.Process | None) -> None:
    """SIGTERM, which lets the engine stop its containers and its own containerd; SIGKILL after a bound."""
    if process is None:
        return
    below = process.children(recursive=True)
    process.terminate()
    _, alive = psutil.wait_procs([process, *below], timeout=STOP_S)
    for left in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(alive, timeout=STOP_S)
