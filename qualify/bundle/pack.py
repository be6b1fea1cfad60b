# SPDX-License-Identifier: Apache-2.0
"""Write a bundle: a reproducible archive of a site folder (and of a Python), cut into parts with checksums."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from qualify import locks
from qualify.bundle import unpack
from qualify.process import capture

GLIBC = "2.31"
"""The oldest C library of a host that unpacks: `glibc_min` of the CUDA cells."""

PURE_SOURCES = ("rouge-score", "sqlitedict", "word2number")
"""Locked distributions that come as a source alone, for lm-eval; all are plain Python, so that one build fits all."""

LEAVE_OUT = ("*/__pycache__", "*.pyc", "*.a", "*/tests/data/*")
_EPOCH = 315532800  # 1980, what zip files call the beginning


@dataclass(frozen=True)
class Part:
    """One part as the manifest lists it."""

    name: str
    bytes: int
    sha256: str


class PartWriter(io.RawIOBase):
    """A stream that is cut into files of `size` bytes; each is hashed as it is written."""

    def __init__(self, folder: Path, size: int) -> None:
        self.parts: list[Part] = []
        self.whole = hashlib.sha256()
        self._folder, self._size = folder, size
        self._file: io.BufferedWriter | None = None
        self._path, self._written, self._hash = folder, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`, over as many parts as it takes."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            if self._file is None:
                self._path = self._folder / f"part.{len(self.parts):03d}"
                self._file, self._written, self._hash = self._path.open("wb"), 0, hashlib.sha256()
            piece = view[start : start + self._size - self._written]
            self._file.write(piece)
            self._hash.update(piece)
            self.whole.update(piece)
            self._written += len(piece)
            start += len(piece)
            if self._written == self._size:
                self._finish()
        return len(view)

    def _finish(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self.parts.append(Part(self._path.name, self._written, self._hash.hexdigest()))
        self._file = None

    def close(self) -> None:
        self._finish()
        super().close()


def files(root: Path, leave_out: Sequence[str] = LEAVE_OUT) -> Iterator[Path]:
    """The files and links below `root` in a fixed order, without what is made anew or never loaded."""
    for path in sorted(root.rglob("*"), key=str):
        name = f"/{path.relative_to(root)}"
        if any(fnmatch(name, pattern) or fnmatch(name, f"{pattern}/*") for pattern in leave_out):
            continue
        if path.is_symlink() or path.is_file():
            yield path


def pack(
    site: Path,
    out: Path,
    part_bytes: int,
    python: Path | None = None,
    leave_out: Sequence[str] = LEAVE_OUT,
    compression: str = "xz",
    version: tuple[int, int] = sys.version_info[:2],
) -> dict[str, Any]:
    """Write parts, manifest and `unpack.py` into `out`, which must be empty or absent; returns the manifest.

    The same folders give the same bytes: order, times and owners are fixed.
    """
    if part_bytes < 1:
        raise unpack.BundleError(f"a part of {part_bytes} bytes holds nothing")
    if out.exists() and any(out.iterdir()):
        raise unpack.BundleError(f"{out} is not empty; choose another folder")
    if not site.is_dir():
        raise unpack.BundleError(f"{site} is no folder; `install` fills one")
    out.mkdir(parents=True, exist_ok=True)
    count = 0
    with PartWriter(out, part_bytes) as parts:
        buffered = io.BufferedWriter(parts, 1 << 20)
        with (
            _compressed(buffered, compression) as stream,
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            roots = {"site": site} if python is None else {"site": site, "python": python}
            for prefix, root in roots.items():
                for path in files(root, leave_out):
                    archive.add(path, f"{prefix}/{path.relative_to(root)}", recursive=False, filter=_plain)
                    count += 1
        buffered.flush()
    manifest = {
        "format": 1,
        "python": list(version),
        "has_python": python is not None,
        "files": count,
        "sha256": parts.whole.hexdigest(),
        "parts": [vars(part) for part in parts.parts],
    }
    (out / unpack.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.copy(unpack.__file__, out / "unpack.py")
    return manifest


def _compressed(target: Any, compression: str) -> AbstractContextManager[Any]:
    """`target` behind a compressor, at its fastest: of 6 GB `gz` makes 3.2 GB in two minutes; `xz` less, in ten."""
    if compression == "xz":
        return lzma.LZMAFile(target, "w", preset=1)
    if compression == "gz":
        return gzip.GzipFile("", "wb", compresslevel=1, fileobj=target, mtime=0)
    return nullcontext(target)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs between two machines."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = _EPOCH
    return member


def install(site: Path, python_version: str, uv: Sequence[str], lock: Path = locks.CUDA_LOCK) -> None:
    """Fill `site` with exactly what the CUDA cells' lock pins, for another Python of this platform.

    By uv alone: pip would judge the lock's markers by the Python that runs it. Takes minutes and needs an index.
    """
    tag = f"x86_64-manylinux_{GLIBC.replace('.', '_')}"
    words = [
        *uv,
        "pip",
        "install",
        "--target",
        str(site),
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
    ]
    for name in PURE_SOURCES:
        words += ["--no-binary", name]
    words += ["--python-version", python_version, "--python-platform", tag, "--requirement", str(lock)]
    capture(words, timeout_s=3600)
