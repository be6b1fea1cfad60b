# SPDX-License-Identifier: Apache-2.0
"""Run one part of the chain as its own process tree and see what it leaves behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from qualify.chain import Part
from qualify.collected import CASES, SHARD
from qualify.expected import Run
from qualify.ledger import Teardown

MARKER = "AFD_GATE_RUN"
METRICS = "AFD_GATE_METRICS"
DIGESTS = "AFD_GATE_DIGESTS"
LOG = "log.txt"
GRACE_S = 10.0
LOOK_S = 1.0
"""How often a part's descendants are looked at while it runs."""

_Value = TypeVar("_Value", float, str)
_SHARED = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True)
class Outcome:
    """How a part ended: exit status (None past its limit), the log, pytest's account, metrics, leftovers.

    `digests` are those of the files that the session says it judged.
    """

    status: int | None
    seconds: float
    log: str
    log_digest: str
    run: Run | None
    metrics: Mapping[str, float]
    teardown: Teardown
    digests: Mapping[str, str] = field(default_factory=dict)


PLACES = frozenset({"AFD_BUNDLE", "AFD_CHECKPOINT_DIR", "AFD_ENGINE_DIR", "AFD_ENV_DIR", "AFD_UPSTREAM_DIR"})
"""Variables that only say where this host keeps what the sessions share."""


def variables(base: Mapping[str, str], folder: Path, part: Part, marker: str) -> dict[str, str]:
    """The environment of a part: the caller's without pytest options of theirs and without variables of the product or
    of its tests, some of which make a case shorter; with the gate's own.
    """
    clean = {
        key: value for key, value in base.items() if not key.startswith(("PYTEST_", "AFD_")) or key in PLACES
    }
    clean |= {MARKER: marker, METRICS: str(folder / "metrics.json"), "NO_COLOR": "1"}
    clean[DIGESTS] = str(folder / "digests.json")
    if part.suite:
        clean |= {
            "PYTEST_ADDOPTS": "-p qualify.collected",
            CASES: str(folder / "cases.json"),
            SHARD: part.shard,
        }
    return clean


def attempt_folder(place: Path, title: str, number: int) -> Path:
    """Where an attempt at a part has its log and accounts."""
    return place / f"{_name(title)} {number}"


def attempts(place: Path, title: str) -> Iterator[Outcome]:
    """What the logs of all attempts at a part say, when nothing else is known of them."""
    for path in sorted(place.glob(f"{_name(title)} */{LOG}")):
        log = path.read_bytes()
        digest = hashlib.sha256(log).hexdigest()
        yield Outcome(None, 0.0, log.decode(errors="replace"), digest, None, {}, Teardown())


def _name(title: str) -> str:
    return title.replace("/", "-of-")


class Running:
    """A part at work as its own process tree, from now on; its log and accounts lie in `folder`.

    A context: what is still there of it when the block ends is ended.
    """

    def __init__(self, part: Part, folder: Path, root: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in ("cases.json", "metrics.json", "digests.json"):
            (folder / stale).unlink(missing_ok=True)
        self._folder, self._marker, self._before = folder, secrets.token_hex(8), _shared_files()
        self._status: int | None = None
        self._seconds = 0.0
        self._seen: dict[int, psutil.Process] = {}
        self._started = time.monotonic()
        with (folder / LOG).open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, *part.command],
                cwd=root,
                env=variables(os.environ, folder, part, self._marker),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # it may end long before anybody asks; an event, since a join that a signal interrupts takes a thread for ended
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="part", daemon=True).start()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exception: object) -> None:
        leaked(self._marker, self._seen, grace_s=0.0)
        self._process.kill()
        self._ended.wait(GRACE_S)

    @property
    def over(self) -> bool:
        """Whether it has ended by itself."""
        return self._ended.is_set()

    def log(self) -> str:
        """What it has written so far."""
        return (self._folder / LOG).read_text(encoding="utf-8", errors="replace")

    def outcome(self, limit_s: float) -> Outcome:
        """Wait for its end, at most until `limit_s` after its beginning, when it is ended; then look what it left."""
        self._ended.wait(max(0.0, self._started + limit_s - time.monotonic()))
        over = self.over and self._seconds <= limit_s
        left = leaked(self._marker, self._seen, grace_s=GRACE_S if over else 0.0)
        self._process.kill()
        self._ended.wait(GRACE_S)
        content = (self._folder / LOG).read_bytes()
        return Outcome(
            self._status if over else None,
            round(self._seconds, 1),
            content.decode(errors="replace"),
            hashlib.sha256(content).hexdigest(),
            _decoded(self._folder / "cases.json"),
            _account(self._folder / "metrics.json", float),
            Teardown(left if over else (), tuple(sorted(_left(_shared_files() - self._before)))),
            _account(self._folder / "digests.json", str),
        )

    def _watch(self) -> None:
        while self._status is None:  # `outcome` bounds it and then ends the process
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    self._seen.setdefault(child.pid, child)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._status = self._process.wait(LOOK_S)
        self._seconds = time.monotonic() - self._started
        self._ended.set()


def leaked(marker: str, seen: Mapping[int, psutil.Process], grace_s: float) -> tuple[str, ...]:
    """End and name every process that is still there after a grace and carries the marker, or was seen to descend from
    the part: vLLM's titles overwrite the environment, and with it the marker.
    """
    deadline = time.monotonic() + grace_s
    while (left := _remaining(marker, seen)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
    names = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(" ".join(Path(word).name for word in process.cmdline()[:4])[:120] or process.name())
            process.kill()
    psutil.wait_procs(left, timeout=GRACE_S)
    return tuple(names)


def _remaining(marker: str, seen: Mapping[int, psutil.Process]) -> list[psutil.Process]:
    found = {process.pid: process for process in _marked(marker)}
    for pid, process in seen.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            # `is_running` knows a number that another process has by now
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found[pid] = process
    return list(found.values())


def _marked(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _shared_files() -> set[str]:
    return {path.name for path in _SHARED.iterdir()} if _SHARED.is_dir() else set()


def _left(names: set[str]) -> set[str]:
    """Those that are nobody's for a whole grace: a process that was killed leaves its semaphores to its tracker."""
    deadline = time.monotonic() + GRACE_S
    while (names := _orphans(names)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return names


def _orphans(names: set[str]) -> set[str]:
    """Those files of shared memory that no living process has open or mapped: nobody will remove them."""
    if not names:
        return set()
    used = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            used |= {
                Path(entry.path).name
                for entry in process.memory_maps()
                if entry.path.startswith(str(_SHARED))
            }
            used |= {
                Path(entry.path).name for entry in process.open_files() if entry.path.startswith(str(_SHARED))
            }
    return (names - used) & _shared_files()


def _decoded(path: Path) -> Run | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.MsgspecError):
        return None


def _account(path: Path, kind: type[_Value]) -> Mapping[str, _Value]:
    """What a session wrote of itself by name; nothing when it wrote nothing of that form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, kind])  # type: ignore[valid-type]
    except (OSError, msgspec.MsgspecError):
        return {}
