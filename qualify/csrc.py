# SPDX-License-Identifier: Apache-2.0
"""Build `afd_plugin/_C.abi3.so` from `csrc/`: `python -m qualify.csrc build`.

The library uses libtorch's stable ABI and Python's limited API, so one file serves every Python from 3.10 and
every torch from 2.13. It needs nvcc 13.0 and torch's headers; it is not part of the wheel, and without it the
package works but for `CudaIpcAFDConnector`. Two builds of the same sources with the same tools are equal byte
by byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from qualify.process import CommandError, capture

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("exchange.cu", "ops.cpp")
HEADERS = ("exchange.h",)
OUTPUT = Path("afd_plugin") / "_C.abi3.so"
CUDA_RELEASE = "13.0"
TORCH_TARGET = "0x020d000000000000"
"""TORCH_TARGET_VERSION of the stable ABI: 2.13."""

INSTALLED = Path("/usr/local/cuda/bin/nvcc")
"""Where an installed toolkit usually has it."""

ARCHITECTURES = (80, 90, 100)
"""Machine code for these compute capabilities; PTX of the last serves later ones."""


class BuildError(RuntimeError):
    """The extension cannot be built here; the message says what is missing."""


@dataclass(frozen=True)
class Tools:
    """Where compiler, toolkit and headers lie."""

    nvcc: Path
    toolkit: Path
    torch: Path
    python_include: Path


def find_tools() -> Tools:
    """Find nvcc (`CUDA_HOME`, the PATH, or the `nvidia-cuda-nvcc` wheel) and torch's headers; BuildError if
    missing.
    """
    nvcc = _nvcc()
    release = capture([nvcc, "--version"]).stdout
    found = re.search(r"release (\d+\.\d+)", release)
    if found is None or found.group(1) != CUDA_RELEASE:
        seen = found.group(1) if found else "an unknown release"
        raise BuildError(
            f"{nvcc} is {seen}; the extension is built with nvcc {CUDA_RELEASE} only (set CUDA_HOME)."
        )
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed in this environment; its headers are needed.")
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").is_file():
        raise BuildError(f"{include} has no Python.h; install this Python's development files.")
    return Tools(nvcc, nvcc.parent.parent, Path(spec.origin).parent, include)


def _nvcc() -> Path:
    home = os.environ.get("CUDA_HOME")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path).resolve()] if on_path else []
    candidates.append(INSTALLED)
    spec = find_spec("nvidia")
    for base in spec.submodule_search_locations or () if spec else ():
        candidates.append(Path(base) / "cu13" / "bin" / "nvcc")
    for candidate in candidates:
        # A wrapper script on the PATH has no toolkit beside it.
        if candidate.is_file() and (candidate.parent.parent / "include" / "cuda_runtime.h").is_file():
            return candidate
    raise BuildError("No nvcc with its toolkit was found; install CUDA 13.0 or set CUDA_HOME.")


def commands(tools: Tools, work: Path, architectures: Sequence[int] = ARCHITECTURES) -> list[list[str]]:
    """The compiler calls, relative to the checkout so that no path of this machine enters the result."""
    generate = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    generate.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    host = ["-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-frandom-seed=afd"]
    includes = [f"-I{tools.torch / 'include'}", f"-I{tools.toolkit / 'include'}", f"-I{tools.python_include}"]
    library = next(
        (
            tools.toolkit / name
            for name in ("lib64", "lib")
            if (tools.toolkit / name / "libcudart_static.a").is_file()
        ),
        tools.toolkit / "lib64",
    )
    return [
        [
            str(tools.nvcc), "-c", "csrc/exchange.cu", "-o", str(work / "exchange.o"), "-O3", "-std=c++20",
            "--threads=1", "-Xcompiler=-fPIC,-fvisibility=hidden,-frandom-seed=afd", *generate,
        ],
        [
            "g++", "-c", "csrc/ops.cpp", "-o", str(work / "ops.o"), *host, f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
            "-DUSE_CUDA", *includes,
        ],
        [
            "g++", "-shared", "-o", str(work / OUTPUT.name), str(work / "exchange.o"), str(work / "ops.o"),
            f"-L{tools.torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-L{library}", "-lcudart_static", "-lpthread", "-lrt",
            "-ldl", "-Wl,--as-needed", "-Wl,--build-id=none", "-Wl,--exclude-libs,ALL", "-s",
        ],
    ]  # fmt: skip


def build(output: Path | None = None, architectures: Sequence[int] = ARCHITECTURES) -> Path:
    """Compile and put the library in its place (or at `output`); returns it. BuildError or CommandError
    otherwise.
    """
    target = output or ROOT / OUTPUT
    tools = find_tools()
    with tempfile.TemporaryDirectory(prefix="afd-csrc-") as scratch:
        work = Path(scratch)
        for command in commands(tools, work, architectures):
            capture(command, cwd=ROOT, timeout_s=900)
        partial = target.with_suffix(".partial")
        shutil.copy(work / OUTPUT.name, partial)
        partial.replace(target)
    return target


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m qualify.csrc", description=__doc__)
    parser.add_argument(
        "action", choices=["build", "check"], help="`check` builds twice and compares the bytes"
    )
    parser.add_argument("--output", type=Path, help="where to put the library instead of the package")
    parser.add_argument(
        "--architectures", type=lambda text: [int(part) for part in text.split(",")], default=list(ARCHITECTURES),
        help="compute capabilities, for example 90 alone for a quick build",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        path = build(options.output, options.architectures)
        first = digest(path)
        print(f"{path} sha256 {first}")
        if options.action == "check":
            with tempfile.TemporaryDirectory() as scratch:
                second = digest(build(Path(scratch) / OUTPUT.name, options.architectures))
            if second != first:
                print(f"a second build has sha256 {second}: the build is not reproducible", file=sys.stderr)
                return 1
            print("a second build is equal byte by byte")
    except (BuildError, CommandError) as error:
        print(f"csrc: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
