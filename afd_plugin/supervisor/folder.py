# SPDX-License-Identifier: Apache-2.0
"""The folder of one supervised run: sockets and scratch of its children, and what `afd status` reads."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_MAX_FOLDER = 107 - 41
"""A socket's path has at most 107 bytes; vLLM puts sockets with names of 36 into its temporary folder."""

STATE_NAME = "state.json"
"""File in the supervisor's directory (``afd-*`` among the temporary files) with the children's phases."""


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """A folder that only this user may enter, until the block is left."""
    name = tempfile.mkdtemp(prefix="afd-")
    if len(name) > _MAX_FOLDER:
        os.rmdir(name)
        name = tempfile.mkdtemp(prefix="afd-", dir="/tmp")
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


def fresh_scratch(folder: Path, child: str, scratch: Mapping[str, str]) -> dict[str, str]:
    """Empty folders for one start of ``child``, as variables; what an earlier start left in them is removed."""
    found = {}
    for variable, name in scratch.items():
        own = folder / f"{child}-{name}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        found[variable] = str(own)
    return found


def write_state(folder: Path, children: Mapping[str, Mapping[str, str | int | float]]) -> None:
    """Leave what is known about the children where `afd status` finds it."""
    path = folder / STATE_NAME
    partial = path.with_suffix(".partial")
    with contextlib.suppress(OSError):  # a full disk costs the glance, not the service
        partial.write_text(json.dumps({"pid": os.getpid(), "children": children}))
        partial.replace(path)
