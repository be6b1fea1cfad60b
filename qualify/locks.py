# SPDX-License-Identifier: Apache-2.0
"""Read and rewrite the hash-locked requirement files under `containers/`. Standard library only."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qualify.process import capture

CONTAINERS = Path(__file__).resolve().parent.parent / "containers"
CPU_LOCK = CONTAINERS / "cpu" / "requirements.lock"
TOOLS_LOCK = CONTAINERS / "tools" / "requirements.lock"
CUDA_LOCK = CONTAINERS / "cuda" / "requirements.lock"
LIGHT_LOCK = CONTAINERS / "light" / "requirements.lock"

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)\s*(?:;\s*(?P<marker>[^\\]*?))?\s*\\?$")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")


class LockError(ValueError):
    """A lock file holds something other than exact, hashed pins."""


@dataclass(frozen=True)
class Pin:
    """One entry of a lock: `name==version`, its environment marker (or empty) and its own lines."""

    name: str
    version: str
    marker: str
    text: str


def parse(text: str, source: str = "lock") -> tuple[Pin, ...]:
    """The pins of one lock, in file order.

    Raises LockError, naming `source` and the line, for anything but `name==version [; marker]` with at least
    one SHA-256: a lock of ours holds no option, no index and no unhashed requirement.
    """
    pins: list[Pin] = []
    block: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if not line[0].isspace():
            _finish(block, pins, source)
            block = []
            if not _PIN.match(line):
                raise LockError(f"{source}:{number}: expected `name==version`, found {line!r}")
        elif not block or not _HASH.search(line):
            raise LockError(f"{source}:{number}: expected a --hash=sha256 line, found {line!r}")
        block.append(line)
    _finish(block, pins, source)
    return tuple(pins)


def _finish(block: Sequence[str], pins: list[Pin], source: str) -> None:
    if not block:
        return
    match = _PIN.match(block[0])
    if match is None:  # pragma: no cover - parse() has matched it
        raise LockError(f"{source}: {block[0]!r}")
    if len(block) == 1:
        raise LockError(f"{source}: {match['name']}=={match['version']} carries no hash")
    pins.append(
        Pin(match["name"].lower(), match["version"], (match["marker"] or "").strip(), "\n".join(block) + "\n")
    )


def subset(text: str, names: Iterable[str]) -> str:
    """The lines of a lock that pin `names`; LockError when one of them is not pinned."""
    wanted = {name.lower() for name in names}
    chosen = [pin for pin in parse(text) if pin.name in wanted]
    if missing := wanted - {pin.name for pin in chosen}:
        raise LockError(f"the lock does not pin {', '.join(sorted(missing))}")
    return "".join(pin.text for pin in chosen)


def constraints(text: str) -> str:
    """A lock as constraints for another resolution: the pins and markers without the hashes."""
    markers = ((pin, f" ; {pin.marker}" if pin.marker else "") for pin in parse(text))
    return "".join(f"{pin.name}=={pin.version}{marker}\n" for pin, marker in markers)


def digest(paths: Iterable[Path]) -> str:
    """One SHA-256 over the contents of lock files, in the order given."""
    whole = hashlib.sha256()
    for path in paths:
        data = path.read_bytes()
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()


def compile_all(uv: Sequence[str], root: Path, scratch: Path, *, upgrade: bool = False) -> None:
    """Resolve every `requirements.in` again for Python 3.10 to 3.14 and rewrite the locks (`nox -s lock`).

    Present pins are kept where they still satisfy the inputs; `upgrade` takes the newest of everything.
    The tools and the light lock are constrained by the CPU cell's, so that all install side by side; the CUDA cells'
    by the tools', so that a tool is the same one everywhere. vLLM's CUDA build has pins of its own beside that.
    """
    common = [
        *uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.10", "--generate-hashes",
        "--no-emit-index-url", "--no-header", "--no-annotate", *(["--upgrade"] if upgrade else []),
    ]  # fmt: skip

    def run(source: str, lock: str, *options: str | Path) -> None:
        capture([*common, *options, source, "--output-file", lock], cwd=root, timeout_s=900)

    def pins(lock: str) -> Path:
        written = scratch / f"{Path(lock).parent.name}-constraints.txt"
        written.write_text(constraints((root / lock).read_text(encoding="utf-8")), encoding="utf-8")
        return written

    cpu = "containers/cpu/requirements"
    run(f"{cpu}.in", f"{cpu}.lock", "--override", "containers/cpu/overrides.in")
    beside_cpu = ("--constraint", pins(f"{cpu}.lock"))
    tools, cuda = "containers/tools/requirements", "containers/cuda/requirements"
    run(f"{tools}.in", f"{tools}.lock", *beside_cpu)
    run("pyproject.toml", "containers/light/requirements.lock", *beside_cpu)
    run(f"{cuda}.in", f"{cuda}.lock", "--constraint", pins(f"{tools}.lock"))
