# SPDX-License-Identifier: Apache-2.0
"""This checkout as an archive for a container: a clone with its history, and the work tree as it is now over it.

The container gets a copy, so nothing that runs there can write here.
"""

from __future__ import annotations

import contextlib
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qualify.process import capture

OWNER = 1000


@contextlib.contextmanager
def archived(root: Path) -> Iterator[BinaryIO]:
    """An open tar file of `root` (tracked files, and others that git does not ignore), owned by the image's user."""
    with tempfile.TemporaryDirectory(prefix="afd-checkout-") as scratch:
        copy = Path(scratch) / "copy"
        capture(["git", "clone", "--quiet", "--no-hardlinks", root, copy], timeout_s=300)
        _as_now(root, copy)
        target = Path(scratch) / "checkout.tar"
        with tarfile.open(target, "w") as archive:
            archive.add(copy, arcname=".", filter=_owned)
        with target.open("rb") as handle:
            yield handle


def _as_now(root: Path, copy: Path) -> None:
    """Carry over what differs from HEAD: changed, new and removed files."""
    listed = ["git", "ls-files", "-z", "--modified", "--deleted", "--others", "--exclude-standard"]
    staged = ["git", "diff", "--name-only", "-z", "--cached", "--no-renames"]
    names = {
        name for words in (listed, staged) for name in capture(words, cwd=root).stdout.split("\0") if name
    }
    for name in sorted(names):
        source, target = root / name, copy / name
        target.unlink(missing_ok=True)
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = OWNER
    entry.uname = entry.gname = ""
    return entry
