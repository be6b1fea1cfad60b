# SPDX-License-Identifier: Apache-2.0
"""TOML files of this package, read strictly: a table with an unknown or a missing key is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class RecordError(ValueError):
    """A data file is not what it should be; the message names the file and what is wrong."""


def read(path: Path) -> dict[str, Any]:
    """The parsed file; raises RecordError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecordError(f"{path}: {error}") from error


def fields(table: Mapping[str, Any], required: set[str], optional: set[str], where: str) -> dict[str, Any]:
    """`table` when it holds every required key and no unknown one."""
    missing = required - set(table)
    unknown = set(table) - required - optional
    if missing or unknown:
        parts = [f"misses {', '.join(sorted(missing))}"] if missing else []
        parts += [f"holds unknown {', '.join(sorted(unknown))}"] if unknown else []
        raise RecordError(f"{where} {' and '.join(parts)}")
    return dict(table)
