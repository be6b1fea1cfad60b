# SPDX-License-Identifier: Apache-2.0
"""What an image's root filesystem holds, as one digest: names, kinds, modes, owners, link targets, bytes.

Times are no part of it. What the engine itself lays into every container is left out.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, cast

from qualify.containers.container import Job, living
from qualify.containers.engine import Engine

ENGINES_OWN = frozenset(
    {".dockerenv", "dev/console", "etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf"}
)
_BLOCK = 2**20


class _Stream:
    """Byte blocks as a file that can be read once."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, bytearray()

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, fewer at the end only."""
        while len(self._rest) < size and (block := next(self._blocks, b"")):
            self._rest += block
        taken = bytes(self._rest[:size])
        del self._rest[:size]
        return taken


def entries(archive: tarfile.TarFile) -> Iterator[tuple[str, str]]:
    """(name, one line that says everything else) of each entry of a tar file."""
    for entry in archive:
        name = entry.name.removeprefix("./").strip("/")
        if name in ENGINES_OWN or name == ".":
            continue
        content = ""
        if entry.isreg():
            whole, handle = hashlib.sha256(), archive.extractfile(entry)
            while handle is not None and (block := handle.read(_BLOCK)):
                whole.update(block)
            content = whole.hexdigest()
        kind = entry.type.decode()
        yield name, f"{kind} {entry.mode:o} {entry.uid}:{entry.gid} {entry.linkname} {content}"


def digest(lines: Mapping[str, str]) -> str:
    """One SHA-256 over all entries in the order of their names."""
    whole = hashlib.sha256()
    for name, line in sorted(lines.items()):
        whole.update(f"{name}\0{line}\n".encode())
    return whole.hexdigest()


def of_image(engine: Engine, image: str) -> dict[str, str]:
    """Every entry of an image's root filesystem."""
    with living(engine, Job(image, ["true"], 60.0, place="/")) as made:
        blocks = _Stream(iter(cast("Iterable[bytes]", made.export(chunk_size=_BLOCK))))
        with tarfile.open(fileobj=cast("IO[bytes]", blocks), mode="r|", bufsize=_BLOCK) as archive:
            return dict(entries(archive))


def changed(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the entries in which two trees differ."""
    return tuple(sorted(name for name in {*one, *other} if one.get(name) != other.get(name)))
