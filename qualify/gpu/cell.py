# SPDX-License-Identifier: Apache-2.0
"""Whether this host is a GPU cell: one sentence when it is not. Standard library only, and no GPU is touched.

Runs in whatever Python asks, so that a session refuses in a second on a host that has nothing of the cell, and so
that no CUDA context exists before the MPS daemon does. The exact tuple is the gate's business (`qualify.identity`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class GpuCell:
    """What must be here before anything is started. The values are those of `containers/cells.toml`."""

    name: str
    devices: int
    device_name: str = "NVIDIA H200"
    distributions: tuple[tuple[str, str], ...] = (("vllm", "0.28.0"), ("torch", "2.13.0"))


CELLS: Mapping[str, GpuCell] = {cell.name: cell for cell in (GpuCell("h200x1", 1), GpuCell("h200x2", 2))}


def device_names() -> tuple[str, ...]:
    """The names of this host's GPUs by the driver's own tool; empty without a driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def version_of(distribution: str) -> str:
    """The installed version without its local part; empty when it is not installed."""
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def refusal(
    cell: GpuCell,
    devices: Callable[[], Sequence[str]] = device_names,
    version: Callable[[str], str] = version_of,
) -> str | None:
    """Why this host is not `cell`, in one sentence; None when nothing speaks against it."""
    seen = devices()
    if not seen:
        return f"this host is not the cell {cell.name}: no NVIDIA GPU answers (nvidia-smi)"
    fitting = [name for name in seen if name == cell.device_name]
    if len(fitting) < cell.devices:
        return (
            f"this host is not the cell {cell.name}: it has {', '.join(seen)}, "
            f"and {cell.devices} x {cell.device_name} are needed"
        )
    for distribution, wanted in cell.distributions:
        found = version(distribution)
        if found != wanted:
            return (
                f"this host is not the cell {cell.name}: {distribution} is {found or 'not installed'} and must be "
                f"{wanted}; unpack the bundle (`nox -s bundle`) and source its `activate`, or install afd-plugin[cuda]"
            )
    return None


def named(words: Sequence[str], default: str = "h200x1") -> GpuCell:
    """The GPU cell that command-line words name (`--cell NAME` or `--cell=NAME`), else `default`'s."""
    for position, word in enumerate(words):
        name = word.removeprefix("--cell=") if word.startswith("--cell=") else ""
        if word == "--cell" and position + 1 < len(words):
            name = words[position + 1]
        if name in CELLS:
            return CELLS[name]
    return CELLS[default]


def asks_for_gpu(words: Sequence[str]) -> bool:
    """Whether a session's words name a GPU cell: it then runs in the Python that runs nox."""
    return any(word.removeprefix("--cell=") in CELLS for word in words)
