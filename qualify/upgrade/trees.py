# SPDX-License-Identifier: Apache-2.0
"""Unmodified vLLM source trees and who they say they are.

A tree comes from a wheel, a source distribution, a revision of a local git clone, or the folder of an installed
`vllm`. Python files are unpacked into a folder that lives as long as the context manager; nothing that was given
is written to.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from qualify.audit.upstream import Upstream
from qualify.process import CommandError, capture

UNKNOWN = "UNKNOWN"
_GIT_LIMIT_S = 120.0


class TreeError(RuntimeError):
    """A source of vLLM cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Identity:
    """What one tree says about itself.

    Attributes:
        source: `wheel`, `sdist`, `git` or `folder`.
        name: the artifact's file name (or the revision asked for); never a path of this machine.
        version: vLLM's own version.
        commit: what the artifact says (`_version.py`), or the full commit of a git revision; `UNKNOWN` if silent.
        sha256: digest of the artifact, or of the Python files where there is no single artifact.
        requires: pinned requirements that decide the runtime tuple, by name.
    """

    source: str
    name: str
    version: str
    commit: str
    sha256: str
    requires: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tree:
    """A readable tree: `root` holds the folder `vllm`."""

    root: Path
    identity: Identity

    @cached_property
    def upstream(self) -> Upstream:
        """The tree's definitions."""
        return Upstream({"vllm": self.root / "vllm"})

    @cached_property
    def files(self) -> dict[str, Path]:
        """Every Python file by its path relative to the tree."""
        found = sorted((self.root / "vllm").rglob("*.py"))
        return {path.relative_to(self.root).as_posix(): path for path in found}


@contextlib.contextmanager
def opened(source: Path, revision: str = "") -> Iterator[Tree]:
    """The tree behind `source`; `revision` names a commit or tag when `source` is a git clone.

    Raises TreeError when there is no vLLM in it.
    """
    if source.is_dir() and not revision and (source / "__init__.py").is_file():
        yield Tree(source.parent, _folder_identity(source))
        return
    with tempfile.TemporaryDirectory(prefix="vllm-source-") as scratch:
        root = Path(scratch)
        if revision:
            identity = _from_git(source, revision, root)
        elif source.suffix == ".whl":
            identity = _from_wheel(source, root)
        elif source.name.endswith(".tar.gz"):
            identity = _from_sdist(source, root)
        else:
            raise TreeError(
                f"{source.name} is no vLLM source: give a wheel, an sdist, a clone with a revision, a folder vllm"
            )
        if not (root / "vllm" / "__init__.py").is_file():
            raise TreeError(f"{source.name} holds no vLLM package")
        yield Tree(root, identity)


def _from_wheel(wheel: Path, root: Path) -> Identity:
    try:
        with zipfile.ZipFile(wheel) as archive:
            wanted = [  # zipfile keeps members below the folder whatever their names say
                name
                for name in archive.namelist()
                if (name.startswith("vllm/") and name.endswith(".py")) or name.endswith(".dist-info/METADATA")
            ]
            for name in wanted:
                archive.extract(name, root)
    except (OSError, zipfile.BadZipFile) as error:
        raise TreeError(f"{wheel.name} cannot be read: {error}") from error
    metadata = next(root.glob("*.dist-info/METADATA"), None)
    text = metadata.read_text(encoding="utf-8") if metadata else ""
    return Identity(
        "wheel",
        wheel.name,
        _header(text, "Version"),
        stated_commit(root / "vllm"),
        _digest(wheel),
        _requires(text),
    )


def _from_sdist(sdist: Path, root: Path) -> Identity:
    with tarfile.open(sdist) as archive:
        for member in archive:
            _, _, inner = member.name.partition("/")
            if member.isfile() and (inner == "PKG-INFO" or _is_source(inner)):
                _store(archive, member, root / inner)
    info = root / "PKG-INFO"
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    version, commit = _header(text, "Version"), stated_commit(root / "vllm")
    return Identity("sdist", sdist.name, version, commit, _digest(sdist), _requires(text))


def _from_git(clone: Path, revision: str, root: Path) -> Identity:
    """`git archive` reads the object store only: neither the checkout nor its HEAD is touched."""
    try:
        commit = capture(
            ["git", "-C", clone, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}"]
        ).stdout.strip()
        done = subprocess.run(
            ["git", "-C", str(clone), "archive", "--format=tar", commit, "vllm"],
            capture_output=True,
            timeout=_GIT_LIMIT_S,
            check=True,
        )
    except (CommandError, OSError, subprocess.SubprocessError) as error:
        raise TreeError(f"revision {revision!r} cannot be read from the clone: {error}") from error
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            if member.isfile() and _is_source(member.name):
                _store(archive, member, root / member.name)
    return Identity("git", revision, revision.lstrip("v"), commit, _tree_digest(root / "vllm"))


def _folder_identity(folder: Path) -> Identity:
    version = re.search(r"^__version__ = (?:version = )?'([^']+)'", _version_file(folder), re.MULTILINE)
    stated = version[1] if version else UNKNOWN
    metadata = sorted(folder.parent.glob("vllm*.dist-info/METADATA"))
    pins = _requires(metadata[0].read_text(encoding="utf-8")) if len(metadata) == 1 else {}
    return Identity("folder", "vllm", stated, stated_commit(folder), _tree_digest(folder), pins)


def stated_commit(folder: Path) -> str:
    """The commit that a built package's `_version.py` states, without setuptools-scm's leading `g`."""
    found = re.search(r"^__commit_id__ = commit_id = '([^']+)'", _version_file(folder), re.MULTILINE)
    return found[1].removeprefix("g") if found else UNKNOWN


def _version_file(folder: Path) -> str:
    path = folder / "_version.py"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _is_source(name: str) -> bool:
    parts = name.split("/")
    return parts[0] == "vllm" and name.endswith(".py") and ".." not in parts


def _store(archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    content = archive.extractfile(member)
    if content is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        with content, place.open("wb") as sink:
            shutil.copyfileobj(content, sink)


def _digest(path: Path) -> str:
    value = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(1 << 20):
            value.update(block)
    return value.hexdigest()


def _tree_digest(folder: Path) -> str:
    value = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        value.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        value.update(hashlib.sha256(path.read_bytes()).digest())
    return value.hexdigest()


def _header(metadata: str, name: str) -> str:
    found = re.search(rf"^{name}: (.+)$", metadata, re.MULTILINE)
    return found[1].strip() if found else UNKNOWN


_TUPLE = re.compile(
    r"^Requires-Dist: (torch|torchvision|torchaudio|transformers|flashinfer-python|triton|xgrammar"
    r"|nvidia-[\w-]+|apache-tvm-ffi|compressed-tensors|numba|setuptools)\s*(\[[^\]]*\])?\s*([^;\n]*)",
    re.MULTILINE,
)


def _requires(metadata: str) -> dict[str, str]:
    found = {"python": _header(metadata, "Requires-Python")}
    for name, _, pin in _TUPLE.findall(metadata):
        found.setdefault(name, pin.strip() or "any")
    return found
