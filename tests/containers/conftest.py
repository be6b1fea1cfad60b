# SPDX-License-Identifier: Apache-2.0
"""A real engine of our own, and an image of a few of this host's files: no index and no registry is needed."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qualify.containers.engine import Engine, opened

COMMANDS = ("cat", "sh", "sleep", "timeout")


def _needed(program: str) -> set[str]:
    printed = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=20, check=True).stdout
    return set(re.findall(r"(/\S+) \(0x", printed))


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Our own engine with a data root of its own."""
    with opened("own", tmp_path_factory.mktemp("data")) as started:
        yield started


@pytest.fixture(scope="module")
def tiny(engine: Engine) -> str:
    """An image with a shell, three commands, their libraries and the user `afd`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for command in COMMANDS:
            found = shutil.which(command)
            assert found is not None
            _add(archive, f"bin/{command}", Path(found).read_bytes(), 0o755)
        for library in sorted({name for command in COMMANDS for name in _needed(str(shutil.which(command)))}):
            _add(archive, library.lstrip("/"), Path(library).read_bytes(), 0o755)
        _add(archive, "etc/passwd", b"root:x:0:0::/:/bin/sh\nafd:x:1000:1000::/srv:/bin/sh\n")
        _add(archive, "etc/group", b"root:x:0:\nafd:x:1000:\n")
    engine.client.api.import_image_from_data(buffer.getvalue(), repository="afd-tiny", tag="test")
    return "afd-tiny:test"
