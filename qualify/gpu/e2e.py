# SPDX-License-Identifier: Apache-2.0
"""`nox -s gpu_e2e`: the tests of `tests/gpu_e2e` on this host's GPUs, or one line and exit status 2.

Words: `all` runs what is marked full, too; `--cell NAME` names the cell (default h200x1); the rest is pytest's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from qualify.gpu.cell import CELLS, GpuCell, named, refusal

SUITE = "tests/gpu_e2e"


def pytest_words(words: Sequence[str], cell: GpuCell) -> list[str]:
    """What pytest is given."""
    rest = list(words)
    while "--cell" in rest:
        position = rest.index("--cell")
        del rest[position : position + 2]
    rest = [word for word in rest if not word.startswith("--cell=")]
    full = ["--full"] if "all" in rest else []
    rest = [word for word in rest if word != "all"]
    folder = [] if any(word.startswith(SUITE) for word in rest) else [SUITE]
    return [*folder, "--durations=20", f"--gpus={cell.devices}", *full, *rest]


def main(words: Sequence[str]) -> int:
    """2 where the cell is not; where it is, pytest takes this process's place and its exit status."""
    unknown = [name for name in _cells(words) if name not in CELLS]
    if unknown:
        print(f"gpu_e2e: {unknown[0]!r} is no GPU cell; known are {', '.join(CELLS)}", file=sys.stderr)
        return 2
    cell = named(words)
    reason = refusal(cell)
    if reason is None:
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *pytest_words(words, cell)])  # noqa: S606
    print(f"gpu_e2e: {reason}", file=sys.stderr)
    return 2


def _cells(words: Sequence[str]) -> list[str]:
    following = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--cell"]
    return following + [word.removeprefix("--cell=") for word in words if word.startswith("--cell=")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
