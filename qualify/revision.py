# SPDX-License-Identifier: Apache-2.0
"""The revision that evidence is bound to: a digest of the committed tree without evidence and generated text.

So committing evidence, or the support tables that are generated from it, changes no revision, and anything
else does. A tag is releasable when its tree has the digest that the evidence names.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from qualify.process import CommandError, capture

EVIDENCE = "evidence/"
GENERATED_FILES = ("docs/support.md",)
"""Written whole by `python -m qualify.docs --write`; no part of the revision."""

GENERATED_REGIONS = ("README.md",)
"""Files with generated parts between markers; the parts are no part of the revision, the rest is."""

_REGION = re.compile(rb"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end: (?P=name) -->)", re.DOTALL)


def is_excluded(path: str) -> bool:
    """Whether a whole file is no part of the revision."""
    return path.startswith(EVIDENCE) or path in GENERATED_FILES


def stripped(path: str, content: bytes) -> bytes:
    """`content` without its generated regions, where `path` may have some."""
    return _REGION.sub(rb"\1\3", content) if path in GENERATED_REGIONS else content


def digest(files: Iterable[tuple[str, str, bytes]]) -> str:
    """SHA-256 over (path, mode, content) of a tree, in path order, without what is excluded."""
    whole = hashlib.sha256()
    for path, mode, content in sorted(files):
        if is_excluded(path):
            continue
        inner = hashlib.sha256(stripped(path, content)).hexdigest()
        whole.update(f"{mode} {inner} {path}\n".encode())
    return whole.hexdigest()


def tree(root: Path, commit: str = "HEAD") -> list[tuple[str, str, bytes]]:
    """(path, mode, content) of every file of a commit; CommandError when git cannot read it."""
    listed = capture(["git", "ls-tree", "-r", "-z", "--full-tree", commit], cwd=root).stdout
    entries = [line.split("\t", 1) for line in listed.split("\0") if line]
    heads = [head.split() for head, _ in entries]
    contents = _blobs(root, [blob for _, _, blob in heads])
    return [
        (path, mode, contents[blob])
        for (_, path), (mode, kind, blob) in zip(entries, heads, strict=True)
        if kind == "blob"
    ]


def _blobs(root: Path, names: Iterable[str]) -> Mapping[str, bytes]:
    wanted = sorted(set(names))
    try:
        done = subprocess.run(
            ["git", "cat-file", "--batch"],
            cwd=root,
            input="".join(f"{name}\n" for name in wanted).encode(),
            capture_output=True,
            timeout=120,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"git cannot read the tree of {root}: {error}") from error
    contents, rest = {}, done.stdout
    for name in wanted:
        head, _, rest = rest.partition(b"\n")
        found, kind, size = head.decode().split()
        if found != name or kind != "blob":
            raise CommandError(f"git answered {head.decode()!r} for the blob {name}")
        contents[name], rest = rest[: int(size)], rest[int(size) + 1 :]
    return contents


def revision(root: Path, commit: str = "HEAD") -> str:
    """The revision of a commit."""
    return digest(tree(root, commit))


def dirty(root: Path) -> tuple[str, ...]:
    """Each path that differs from HEAD or is untracked and not ignored, but for what is excluded.

    A change inside a generated region alone is none.
    """
    printed = capture(["git", "status", "--porcelain", "-z", "--untracked-files=all"], cwd=root).stdout
    paths, fields = [], iter(printed.split("\0"))
    for field in fields:
        if not field:
            continue
        paths.append(field[3:])
        if field[0] in "RC":
            paths.append(next(fields))
    return tuple(sorted(path for path in paths if not is_excluded(path) and _changed(root, path)))


def _changed(root: Path, path: str) -> bool:
    if path not in GENERATED_REGIONS or not (root / path).is_file():
        return True
    done = capture(["git", "show", f"HEAD:{path}"], cwd=root, check=False)
    committed = stripped(path, done.stdout.encode())
    return done.returncode != 0 or committed != stripped(path, (root / path).read_bytes())
