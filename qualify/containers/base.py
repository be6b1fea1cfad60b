# SPDX-License-Identifier: Apache-2.0
"""The first layer of every image: Debian packages alone, or an image of a registry by its digest.

`rootfs` needs no registry of images: mmdebstrap takes the packages from the host's own Debian index. With
SOURCE_DATE_EPOCH set, two runs against one index give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from docker.errors import ImageNotFound

from qualify.containers.engine import Engine, EngineError
from qualify.process import capture

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "g++", "git", "libnuma1", "procps", "python3", "python3-dev", "python3-venv")
"""Beyond Debian's minimal set: what making a cell and running its sessions needs. vLLM compiles while it serves: by
torch on a CPU, by Triton on a GPU.
"""

EPOCH = 1767225600
"""Every file of an image is as old as 2026-01-01T00:00:00Z."""

REPOSITORY = "afd-base"
_PINNED = re.compile(r"[\w./:-]+@sha256:[0-9a-f]{64}")


def chosen(engine: Engine, base: str, *, fresh: bool = False) -> str:
    """The image to build on: made here for `rootfs`, else `base` itself, which must be pinned by digest."""
    if base == "rootfs":
        return _made(engine, fresh=fresh)
    if not _PINNED.fullmatch(base):
        raise EngineError(f"--base is {base!r}: `rootfs`, or an image pinned as NAME@sha256:DIGEST")
    return base


def recipe() -> str:
    """What decides a base, but for the state of the package index."""
    return hashlib.sha256(f"1 {SUITE} {PACKAGES} {EPOCH}".encode()).hexdigest()[:12]


def _made(engine: Engine, *, fresh: bool) -> str:
    tag = f"{REPOSITORY}:{recipe()}"
    if not fresh:
        try:
            engine.client.images.get(tag)
        except ImageNotFound:
            pass
        else:
            print(f"base {tag}: made before", flush=True)
            return tag
    with tempfile.TemporaryDirectory(prefix="afd-base-") as scratch:
        Path(scratch).chmod(0o755)  # apt's own user reads what lies below
        archive = Path(scratch) / "base.tar"
        content = bootstrap(archive)
        with archive.open("rb") as handle:
            engine.client.api.import_image(handle, repository=REPOSITORY, tag=recipe())
    print(f"base {tag}: {SUITE}, sha256 {content}", flush=True)
    return tag


def bootstrap(archive: Path) -> str:
    """Write the base as a tar file; its SHA-256. EngineError without mmdebstrap.

    mmdebstrap works beside the archive and in a mount namespace of its own, so that a killed one leaves nothing mounted
    and its files go with the archive's folder.
    """
    if shutil.which("mmdebstrap") is None:
        raise EngineError(
            "there is no mmdebstrap: install it (Debian: apt-get install mmdebstrap), or give a base image"
        )
    print(f"making the base from Debian {SUITE} packages", flush=True)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH), "TMPDIR": str(archive.parent)}
    words = [
        "unshare",
        "--mount",
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        SUITE,
        str(archive),
    ]
    capture(words, env=environment, timeout_s=1200)
    whole = hashlib.sha256()
    with archive.open("rb") as handle:
        while block := handle.read(2**20):
            whole.update(block)
    return whole.hexdigest()
