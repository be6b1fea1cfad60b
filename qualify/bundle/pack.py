# SPDX-License-Identifier: Apache-2.0
"""Write a bundle: a reproducible archive of a site folder (and of a Python), cut into parts with checksums."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from qualify.bundle import unpack
from qualify.process import capture

REQUIREMENTS = (
    "vllm==0.28.0",
    "torch==2.13.0",
    "cuda-python>=13,<14",
    "nox>=2025.2.9",
    "pytest>=8",
    "pytest-timeout",
    "pytest-cov",
    "lm-eval>=0.4.9",
    "datasets",
    "transformers",
)
"""What `install` puts into a site: the runtime, and what the GPU sessions and the accuracy session need."""

TAGS = (
    "manylinux_2_35",
    "manylinux_2_31",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_18",
    "manylinux_2_17",
)
"""Platform tags of wheels that fit the cell's glibc, newest first; pip compares each exactly."""

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
        mode: Any = f"w|{'' if compression == 'none' else compression}"
        with tarfile.open(fileobj=buffered, mode=mode, format=tarfile.PAX_FORMAT) as archive:
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


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs between two machines."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = _EPOCH
    return member


def install(site: Path, python_version: str, requirements: Sequence[str]) -> None:
    """Fill `site` with wheels for another Python of this platform, by pip; takes minutes and needs an index."""
    words = [
        sys.executable, "-m", "pip", "install", "--target", str(site), "--only-binary=:all:", "--no-compile",
        "--implementation", "cp", "--python-version", python_version,
    ]  # fmt: skip
    for tag in TAGS:
        words += ["--platform", f"{tag}_x86_64"]
    words += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    capture([*words, *requirements], timeout_s=3600)
