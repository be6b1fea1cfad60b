# SPDX-License-Identifier: Apache-2.0
"""A vLLM release's wheel, from the user's own index into the cache."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from qualify.process import CommandError, capture

_LIMIT_S = 1800.0
_VERSION = re.compile(r"\d+\.\d+\.\d+(?:\.post\d+)?")


class FetchError(RuntimeError):
    """No wheel of the asked version could be had; the message says what was tried."""


def cache() -> Path:
    """Where wheels are kept between runs: `AFD_UPSTREAM_DIR`, or below the user's cache directory."""
    if chosen := os.environ.get("AFD_UPSTREAM_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "afd-plugin" / "upstream"


def wheel(version: str, folder: Path | None = None) -> Path:
    """The wheel of exactly `version`, downloaded once (300 MB) and never installed or unpacked there.

    Raises FetchError when the version is no plain release or when pip finds none.
    """
    if not _VERSION.fullmatch(version):
        raise FetchError(f"{version!r} is no exact vLLM release: give one as 0.30.0")
    place = folder or cache()
    if kept := _find(place, version):
        return kept
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip"] if _has_pip() else ["pip"]
    options: list[str | Path] = [
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(place),
        f"vllm=={version}",
    ]
    try:
        capture([*command, *options], timeout_s=_LIMIT_S)
    except CommandError as error:
        raise FetchError(f"vLLM {version} could not be downloaded: {error}") from error
    kept = _find(place, version)
    if kept is None:
        raise FetchError(f"pip downloaded vLLM {version} and left no wheel of it in the cache")
    return kept


def _find(place: Path, version: str) -> Path | None:
    return next(iter(sorted(place.glob(f"vllm-{version}-*.whl"))), None)


def _has_pip() -> bool:
    try:
        capture([sys.executable, "-m", "pip", "--version"])
    except CommandError:
        return False
    return True
