# SPDX-License-Identifier: Apache-2.0
"""The trained checkpoints that the repository carries, and whether they are still what was trained.

Each lies in a folder of its own with `training.json`, the record of how it was made, which names the SHA-256 of every
other file. A checkpoint that does not have its digests is not used.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from qualify.accuracy.architectures import ARCHITECTURES, Architecture

FOLDER = Path(__file__).with_name("checkpoints")
RECORD = "training.json"


class CheckpointAltered(RuntimeError):
    """A checkpoint is not there, or not what its record says; the message names the file."""


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record(architecture: Architecture, folder: Path = FOLDER) -> dict[str, Any]:
    """How a checkpoint was trained."""
    path = folder / architecture.name / RECORD
    if not path.is_file():
        raise CheckpointAltered(f"{path} is missing: `python -m qualify.accuracy.train` makes it")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def checked(architecture: Architecture, folder: Path = FOLDER) -> Path:
    """The checkpoint's folder; CheckpointAltered unless each file has the digest that the record names."""
    place, files = folder / architecture.name, record(architecture, folder)["files"]
    there = {path.name for path in place.iterdir()} - {RECORD}
    if there != set(files):
        raise CheckpointAltered(f"{place} has {sorted(there)}, its record names {sorted(files)}")
    for name, wanted in files.items():
        if digest(place / name) != wanted:
            raise CheckpointAltered(f"{place / name} is not the file that was trained: its digest is another")
    return place


def all_checked(folder: Path = FOLDER) -> dict[str, Path]:
    """Every checkpoint by name."""
    return {name: checked(architecture, folder) for name, architecture in ARCHITECTURES.items()}
