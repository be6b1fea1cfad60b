# SPDX-License-Identifier: Apache-2.0
"""Check and unpack a bundle: `python3 unpack.py PARTS TARGET`, then `. TARGET/activate`.

PARTS is the folder with `bundle.json` and the parts, or a folder of folders with one part each. Every part is checked
before anything is unpacked. Standard library only, any Python from 3.10; this file travels with the parts.
"""

import compileall
import hashlib
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

MANIFEST = "bundle.json"
MARKER = "complete.json"
_CHUNK = 1 << 20

ACTIVATE = """\
# . {target}/activate
export AFD_BUNDLE="{target}"
export PATH="{target}/{python}bin:$PATH"
export PYTHONPATH="{target}/site"
export LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
# The sampler of FlashInfer would compile itself for minutes; nothing can be downloaded.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_USE_FLASHINFER_SAMPLER=0
"""


class BundleError(RuntimeError):
    """The bundle cannot be unpacked here; the message says which part is wrong and how."""


class Parts(io.RawIOBase):
    """The parts, one after the other, as one stream."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._open: io.BufferedReader | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        while True:
            if self._open is None:
                if not self._paths:
                    return 0
                self._open = self._paths.pop(0).open("rb")
            count = self._open.readinto(buffer)
            if count:
                return count
            self._open.close()
            self._open = None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        super().close()


def digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            whole.update(piece)
    return whole.hexdigest()


def found(folder: Path, name: str) -> Path:
    """A file of the bundle, in the folder itself or one below; BundleError when it is not there exactly once."""
    places = [path for path in (folder / name, *sorted(folder.glob(f"*/{name}"))) if path.is_file()]
    if len(places) != 1:
        raise BundleError(f"{name} is there {len(places)} times below {folder}; exactly one is needed")
    return places[0]


def checked(folder: Path) -> tuple[dict, list[Path]]:  # type: ignore[type-arg]
    """The manifest and its parts in order; BundleError names the first part that is missing or altered."""
    manifest = json.loads(found(folder, MANIFEST).read_text(encoding="utf-8"))
    paths = []
    for part in manifest["parts"]:
        path = found(folder, part["name"])
        size = path.stat().st_size
        if size != part["bytes"]:
            raise BundleError(
                f"{part['name']} has {size} bytes; the bundle has {part['bytes']}: fetch it again"
            )
        if digest(path) != part["sha256"]:
            raise BundleError(f"{part['name']} is not what was packed (SHA-256 differs): fetch it again")
        paths.append(path)
    return manifest, paths


def refuse_interpreter(manifest: dict, running: tuple[int, int]) -> None:  # type: ignore[type-arg]
    """BundleError where the packed extensions do not fit and no Python was packed beside them."""
    wanted = tuple(manifest["python"])
    if not manifest["has_python"] and running != wanted:
        raise BundleError(
            f"this is Python {running[0]}.{running[1]}; the bundle's extensions need {wanted[0]}.{wanted[1]} "
            "(a bundle packed with --python brings its own)"
        )


def unpack(folder: Path, target: Path, running: tuple[int, int] = sys.version_info[:2]) -> dict:  # type: ignore[type-arg]
    """Check every part, unpack into `target` (which must not exist), write `activate`; the manifest."""
    manifest, paths = checked(folder)
    refuse_interpreter(manifest, running)
    if target.exists():
        raise BundleError(f"{target} exists already; remove it or choose another folder")
    target.mkdir(parents=True)
    try:
        with (
            Parts(paths) as stream,
            tarfile.open(fileobj=io.BufferedReader(stream, _CHUNK), mode="r|*") as archive,
        ):
            for member in archive:
                _refuse_escape(member)
                archive.extract(member, target, **_filter())
        _activate(target.absolute(), manifest)
        _compile(target, manifest, running)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    (target / MARKER).write_text(json.dumps({"sha256": manifest["sha256"]}) + "\n", encoding="utf-8")
    return manifest


def _filter() -> dict:  # type: ignore[type-arg]
    """The safe way to unpack where this Python has it; what it would refuse is refused before, too."""
    return {"filter": "tar"} if sys.version_info >= (3, 12) else {}


def _refuse_escape(member: tarfile.TarInfo) -> None:
    parts = Path(member.name).parts
    if Path(member.name).is_absolute() or ".." in parts:
        raise BundleError(f"the bundle holds {member.name!r}, which would land outside its folder")


def _activate(target: Path, manifest: dict) -> None:  # type: ignore[type-arg]
    if not manifest["has_python"]:
        _borrow_interpreter(target)
    libraries = sorted(str(path.parent) for path in (target / "site" / "nvidia").glob("*/lib/*.so*"))
    python = "python/" if manifest["has_python"] else ""
    text = ACTIVATE.format(target=target, libraries=":".join(dict.fromkeys(libraries)), python=python)
    (target / "activate").write_text(text, encoding="utf-8")


def _compile(target: Path, manifest: dict, running: tuple[int, int]) -> None:  # type: ignore[type-arg]
    """Byte-code once, on all cores, where it is this Python's. A service is five processes, and each would compile
    torch and vLLM again wherever PYTHONDONTWRITEBYTECODE is set: 32 s each, on the host where this was seen. What does
    not compile is left as it is.
    """
    if tuple(manifest["python"]) == running:
        compileall.compile_dir(target / "site", quiet=2, workers=0)


def _borrow_interpreter(target: Path) -> None:
    """The host's interpreter without the host's packages: what is installed beside it is no part of the cell."""
    base = Path(sys._base_executable)  # type: ignore[attr-defined]  # the one below a virtual environment
    (target / "bin").mkdir()
    for name in ("python", "python3"):
        (target / "bin" / name).symlink_to(base)
    text = f"home = {base.parent}\ninclude-system-site-packages = false\n"
    (target / "pyvenv.cfg").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """0 when everything is unpacked, 1 when a part is refused, 2 for wrong words."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python3 unpack.py PARTS TARGET\n")
        return 2
    try:
        manifest = unpack(Path(arguments[0]), Path(arguments[1]))
    except (BundleError, OSError, tarfile.TarError, KeyError, ValueError) as error:
        sys.stderr.write(f"unpack: {error}\n")
        return 1
    sys.stdout.write(f"{manifest['files']} files unpacked; now: . {arguments[1]}/activate\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
