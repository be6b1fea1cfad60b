# SPDX-License-Identifier: Apache-2.0
"""A cell's image: a base, and on it exactly what the cell's locks pin, put there by the cell's own code."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from docker.errors import ImageNotFound

from qualify.cells import Cell, load
from qualify.containers import base as bases
from qualify.containers import secrets
from qualify.containers.engine import Engine, EngineError
from qualify.process import stream

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = "containers"
MAKERS = ("__init__.py", "environment.py", "locks.py", "process.py")
"""The modules of `qualify` that make a cell; they import nothing beyond the standard library."""

BUILD_S = 3600.0
NEEDED_BYTES = 14 * 2**30
"""Of the CPU cell; a CUDA cell needs twice as much."""


@dataclass(frozen=True)
class Recipe:
    """What an image is made of: its Dockerfile and its cell."""

    cell: Cell
    root: Path = ROOT

    @property
    def tag(self) -> str:
        """The image's name in the engine: the cell, and the digest of its locks."""
        return f"afd-{self.dockerfile.stem}:{self.cell.lock_digest(self.root)[:12]}"

    @property
    def dockerfile(self) -> Path:
        """`cpu.Dockerfile` for a cell without devices, else `cuda.Dockerfile`."""
        return self.root / FOLDER / ("cuda.Dockerfile" if self.cell.devices else "cpu.Dockerfile")

    @property
    def needed_bytes(self) -> int:
        """The room that a build takes on the engine's disk."""
        return NEEDED_BYTES * (2 if self.cell.devices else 1)

    def words(self, session: str, arguments: Sequence[str]) -> list[str]:
        """The command that runs a session in a container.

        A session of the CPU cell adds the checkout to its environment itself; on a GPU host sessions run in the Python
        that runs nox, so there it is added first, without an index.
        """
        nox = ["nox", "-s", session, *(["--", *arguments] if arguments else [])]
        if not self.cell.devices:
            return nox
        pip = "python -m pip install --quiet --no-deps --no-index --no-build-isolation --editable ."
        return ["sh", "-ec", f'{pip}; exec "$@"', "sh", *nox]

    def context(self, folder: Path) -> None:
        """Lay everything that a build may see into an empty folder: locks and what makes a cell of them."""
        for name in (*self.cell.locks, *(f"qualify/{maker}" for maker in MAKERS)):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.root / name, target)


def recipe(name: str) -> Recipe:
    """The recipe of a cell by name; EngineError for a cell that has no lock to install."""
    cell = load(name)
    if not cell.locks:
        raise EngineError(f"cell {name} has no lock yet, so there is nothing exact to build an image from")
    return Recipe(cell)


def build(engine: Engine, made: Recipe, base: str, *, fresh: bool = False) -> str:
    """Build a cell's image and return its id. `fresh` uses no layer that stands already, base included."""
    free = shutil.disk_usage(_storage(engine)).free
    if free < made.needed_bytes:
        raise EngineError(
            f"the engine's disk has {free / 2**30:.0f} GiB free, an image needs {made.needed_bytes / 2**30:.0f}: make "
            "room, or set AFD_ENGINE_DIR to a directory on another disk"
        )
    below = bases.chosen(engine, base, fresh=fresh)
    with tempfile.TemporaryDirectory(prefix="afd-image-") as scratch:
        folder = Path(scratch)
        (folder / "context").mkdir()
        made.context(folder / "context")
        command = engine.cli("build", "--network", "host", "--progress", "plain", "--tag", made.tag)
        command += ["--build-arg", f"BASE={below}", "--build-arg", f"SOURCE_DATE_EPOCH={bases.EPOCH}"]
        command += ["--label", f"org.afd-plugin.lock={made.cell.lock_digest(made.root)}"]
        (folder / "secrets").mkdir(mode=0o700)
        for name, path in secrets.written(folder / "secrets").items():
            command += ["--secret", f"id={name},src={path}"]
        command += ["--no-cache"] if fresh else []
        command += ["--file", str(made.dockerfile), str(folder / "context")]
        print(f"building {made.tag}; {made.cell.debt.get('image', 'published')}", flush=True)
        variables = secrets.plain_environment() | {"DOCKER_BUILDKIT": "1"}
        stream(command, log=folder / "log", env=variables, timeout_s=BUILD_S)
    return standing(engine, made)


def standing(engine: Engine, made: Recipe) -> str:
    """The id of a cell's image; EngineError when it has not been built for these locks."""
    try:
        found = engine.client.images.get(made.tag)
    except ImageNotFound:
        raise EngineError(
            f"there is no image {made.tag}: `nox -s containers -- build {made.cell.name}` makes it"
        ) from None
    return str(found.id)


def _storage(engine: Engine) -> str:
    root = str(engine.client.info()["DockerRootDir"])
    return root if Path(root).is_dir() else sys.prefix
