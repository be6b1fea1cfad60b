# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m qualify.bundle install|pack|verify`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from qualify import environment
from qualify.bundle import pack, unpack
from qualify.process import CommandError

MIB = 1 << 20


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qualify.bundle", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    install = actions.add_parser(
        "install", help="fill a site folder from an index with what the CUDA lock pins"
    )
    install.add_argument("--site", type=Path, required=True)
    install.add_argument("--python-version", default="3.12", help="of the host that will unpack")
    packing = actions.add_parser("pack", help="write the parts")
    packing.add_argument("--site", type=Path, required=True, help="site-packages of the cell")
    packing.add_argument("--out", type=Path, required=True)
    packing.add_argument("--part-mib", type=int, default=48, help="size of a part")
    packing.add_argument("--python", type=Path, help="a relocatable Python to pack, too")
    packing.add_argument("--python-version", default="3.12", type=_version, help="of the site's extensions")
    packing.add_argument("--leave-out", action="append", default=list(pack.LEAVE_OUT), metavar="PATTERN")
    packing.add_argument("--compression", choices=["xz", "gz", "none"], default="xz")
    verify = actions.add_parser("verify", help="check the parts against their manifest")
    verify.add_argument("folder", type=Path)
    return parser


def _uv() -> tuple[str, ...]:
    cells = environment.cells_directory()
    cells.mkdir(parents=True, exist_ok=True)
    return environment.find_uv(cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when done, 1 when a part or a folder is refused."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.action == "install":
            pack.install(chosen.site, chosen.python_version, _uv())
        elif chosen.action == "pack":
            manifest = pack.pack(
                chosen.site, chosen.out, chosen.part_mib * MIB, chosen.python, chosen.leave_out,
                chosen.compression, chosen.python_version,
            )  # fmt: skip
            print(
                f"{manifest['files']} files in {len(manifest['parts'])} parts; on the host without an index:"
            )
            print(f"  python3 {chosen.out.name}/unpack.py {chosen.out.name} CELL && . CELL/activate")
            print("  python3 -m nox -s native_control -- --cell h200x1")
        else:
            manifest, paths = unpack.checked(chosen.folder)
            print(f"{len(paths)} parts of {manifest['files']} files are what was packed")
    except (unpack.BundleError, CommandError, OSError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
