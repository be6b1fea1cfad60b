# SPDX-License-Identifier: Apache-2.0
"""The intended runtimes: `containers/cells.toml` as values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from qualify import locks

ROOT = Path(__file__).resolve().parent.parent
CELLS = ROOT / "containers" / "cells.toml"
NOT_USED = "not used"
"""What a cell says of a part that it does not have; never a stand-in for a value nobody has seen."""


class CellError(ValueError):
    """`cells.toml` or a lock is not what it should be; the message says which value is and where."""


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One exact runtime as it is meant to be.

    A field that is None has not been seen yet: `debt` says of each such field which claim it blocks.
    """

    name: str = ""
    summary: str
    python: tuple[str, ...]
    platform: str
    glibc_min: str
    vllm: str
    vllm_distribution: str
    vllm_artifacts: str | None = None
    torch: str
    torch_commit: str | None = None
    torch_cuda: str
    cxx11_abi: bool
    nccl: str
    driver_min: str
    compute_capabilities: tuple[str, ...]
    devices: int
    device_name: str
    interconnect: str | None = None
    image: str | None = None
    locks: tuple[str, ...]
    lock_sha256: str | None = None
    debt: Mapping[str, str] = {}

    def lock_digest(self, root: Path = ROOT) -> str:
        """The digest of the lock files as they are now."""
        return locks.digest(root / name for name in self.locks)


_MAY_BE_DEBT = ("vllm_artifacts", "torch_commit", "interconnect", "image", "lock_sha256")


def parse(text: str) -> dict[str, Cell]:
    """The cells of one TOML text; CellError for an unknown key, a gap without debt or debt without a gap."""
    try:
        found = msgspec.toml.decode(text.encode(), type=dict[str, Cell])
    except msgspec.MsgspecError as error:
        raise CellError(f"cells.toml: {error}") from error
    cells = {name: msgspec.structs.replace(cell, name=name) for name, cell in found.items()}
    for cell in cells.values():
        values = msgspec.structs.asdict(cell)
        for field in _MAY_BE_DEBT:
            if (values[field] is None) != (field in cell.debt):
                want = "names no debt for it" if values[field] is None else "still names debt for it"
                raise CellError(f"cell {cell.name}: `{field}` is {values[field]!r} and the cell {want}")
        if stray := set(cell.debt) - set(_MAY_BE_DEBT):
            raise CellError(f"cell {cell.name}: debt for {sorted(stray)}, which cannot be left open")
    return cells


def load(name: str, path: Path = CELLS) -> Cell:
    """One cell by name; CellError when there is none."""
    cells = parse(path.read_text(encoding="utf-8"))
    if name not in cells:
        raise CellError(f"no cell is called {name!r}; containers/cells.toml has {', '.join(cells)}")
    return cells[name]


def with_current_locks(text: str, root: Path = ROOT) -> str:
    """`cells.toml` with every `lock_sha256` that stands there set to the digest of the lock files now.

    Part of `nox -s lock`: a cell whose lock moved is another cell, and this line of the diff shows it.
    """
    for cell in parse(text).values():
        if cell.lock_sha256 is not None:
            pattern = rf"(^\[{re.escape(cell.name)}\]$.*?^lock_sha256 = \")[0-9a-f]+(\"$)"
            text = re.sub(
                pattern, rf"\g<1>{cell.lock_digest(root)}\g<2>", text, flags=re.DOTALL | re.MULTILINE
            )
    return text


def main() -> int:
    """`python -m qualify.cells`: write the current lock digests into cells.toml."""
    CELLS.write_text(with_current_locks(CELLS.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
