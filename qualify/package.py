# SPDX-License-Identifier: Apache-2.0
"""Build what is shipped, twice, and prove it: bytes, file list, import without vLLM, discovery beside it.

`python -m qualify.package` inside the environment. Builds from a copy of the tracked files, so that nothing
untracked can be needed by or slip into an artifact. The artifacts are left in `dist/`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection
from pathlib import Path

from qualify import locks
from qualify.process import CommandError, capture, clean_environment

ROOT = Path(__file__).resolve().parent.parent
SDIST_EXTRAS = frozenset({".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"})
METADATA = frozenset({"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"})
HEAVY = ("vllm", "torch", "zmq", "transformers", "numpy")


class PackageError(RuntimeError):
    """An artifact is not what it should be; the message lists each difference."""


def tracked(root: Path) -> frozenset[str]:
    """The paths git tracks in `root` that still exist."""
    listed = capture(["git", "ls-files", "-z"], cwd=root).stdout
    return frozenset(name for name in listed.split("\0") if name and (root / name).is_file())


def expected_wheel(names: Collection[str], version: str) -> frozenset[str]:
    """The wheel's exact members: the tracked package, and its metadata."""
    package = {name for name in names if name.startswith("afd_plugin/")}
    return frozenset(package | {f"afd_plugin-{version}.dist-info/{name}" for name in METADATA})


def expected_sdist(names: Collection[str], version: str) -> frozenset[str]:
    """The sdist's exact members: the tracked package and what is needed to build and read it."""
    package = {name for name in names if name.startswith("afd_plugin/")}
    return frozenset(f"afd_plugin-{version}/{name}" for name in package | SDIST_EXTRAS)


def differences(actual: Collection[str], expected: Collection[str]) -> tuple[str, ...]:
    """One line for each member too many and each missing, sorted."""
    return (
        *(f"should not be there: {name}" for name in sorted(set(actual) - set(expected))),
        *(f"is missing: {name}" for name in sorted(set(expected) - set(actual))),
    )


def members(artifact: Path) -> list[str]:
    """The file names inside a wheel or an sdist."""
    if artifact.suffix == ".whl":
        with zipfile.ZipFile(artifact) as wheel:
            return [info.filename for info in wheel.infolist() if not info.is_dir()]
    with tarfile.open(artifact) as sdist:
        return [info.name for info in sdist.getmembers() if info.isfile()]


def export(root: Path, names: Collection[str], target: Path) -> None:
    """Copy the tracked files, and nothing else, to `target`."""
    for name in names:
        goal = target / name
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, goal)


def build(source: Path, out: Path, epoch: int) -> dict[str, str]:
    """Build wheel and sdist of `source` into `out`; the SHA-256 of each by file name."""
    command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel"]
    capture(
        [*command, "--outdir", out, source],
        env=clean_environment() | {"SOURCE_DATE_EPOCH": str(epoch)},
        timeout_s=300,
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def build_twice(root: Path, scratch: Path, epoch: int) -> Path:
    """Build in two places with different names and times; the first output directory.

    Raises PackageError unless both give the same bytes and exactly the expected members.
    """
    names = tracked(root)
    hashes = []
    for label in ("first", "second-with-a-longer-name"):
        export(root, names, scratch / label)
        hashes.append(build(scratch / label, scratch / f"{label}-out", epoch))
    if hashes[0] != hashes[1]:
        raise PackageError(f"two builds of the same files differ: {hashes[0]} and {hashes[1]}")
    version = project_version(root)
    out = scratch / "first-out"
    artifacts = {
        f"afd_plugin-{version}-py3-none-any.whl": expected_wheel(names, version),
        f"afd_plugin-{version}.tar.gz": expected_sdist(names, version),
    }
    if complaints := differences(hashes[0], artifacts):
        raise PackageError("the build made other artifacts:\n" + "\n".join(complaints))
    for artifact, expected in artifacts.items():
        if complaints := differences(members(out / artifact), expected):
            raise PackageError(f"{artifact} holds other files:\n" + "\n".join(complaints))
        print(f"{artifact}: {len(expected)} files, sha256 {hashes[0][artifact]}, twice the same bytes")
    return out


def project_version(root: Path) -> str:
    """`version` in pyproject.toml."""
    match = re.search(
        r'^version = "(.+)"', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    if match is None:
        raise PackageError("pyproject.toml states no version")
    return match[1]


def mirrored(version: str, vllm: str) -> bool:
    """Whether a version of this project may be published for a vLLM release: the same, or `.postN` of it."""
    return re.fullmatch(rf"{re.escape(vllm)}(\.post[1-9]\d*)?", version) is not None


IMPORT_ALONE = """
import importlib.metadata, importlib.util, sys
import afd_plugin
loaded = sorted(name for name in {heavy!r} if name in sys.modules)
assert not loaded, f"import afd_plugin loads {{loaded}}"
assert afd_plugin.__version__ == importlib.metadata.version("afd-plugin") == {version!r}
afd_plugin.register()
assert not importlib.util.find_spec("vllm"), "this check needs an environment without vLLM"
"""

DISCOVER = """
import importlib.metadata
points = [p for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "afd"]
assert [p.value for p in points] == ["afd_plugin:register"], points
import vllm
from vllm.plugins import load_plugins_by_group
found = load_plugins_by_group("vllm.general_plugins")
assert "afd" in found, sorted(found)
found["afd"]()
found["afd"]()
assert vllm.__version__ == {version!r}, vllm.__version__
"""


def check_without_vllm(wheel: Path, scratch: Path, version: str) -> None:
    """Install the wheel with its locked dependencies into a clean environment and use it there."""
    light = scratch / "light"
    capture([sys.executable, "-m", "venv", "--without-pip", light])
    python, quiet = light / "bin" / "python", clean_environment()
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-compile"]
    capture([*install, "--require-hashes", "--requirement", locks.LIGHT_LOCK], env=quiet, timeout_s=600)
    capture([*install, "--no-index", wheel], env=quiet, timeout_s=300)
    capture([*pip, "check"], env=quiet)
    code = IMPORT_ALONE.format(heavy=HEAVY, version=version)
    capture([python, "-W", "error", "-c", code], cwd=scratch, env=quiet)
    afd = light / "bin" / "afd"
    said = capture([afd, "--version"], cwd=scratch, env=quiet).stdout
    if version not in said:
        raise PackageError(f"`afd --version` without vLLM prints {said!r}, not {version}")
    helped = capture([afd, "--help"], cwd=scratch, env=quiet).stdout
    for command in ("serve", "attention", "ffn", "check", "demo"):
        if command not in helped:
            raise PackageError(f"`afd --help` without vLLM does not name `{command}`")
    print("without vLLM: imports, loads nothing heavy, `afd --version` and `afd --help` work")


def main() -> int:
    """Run every check; print what was proven, or the first fault, and exit 1 for a fault."""
    version = project_version(ROOT)
    try:
        epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _commit_time())
        with tempfile.TemporaryDirectory(prefix="afd-package-") as place:
            scratch = Path(place)
            out = build_twice(ROOT, scratch, epoch)
            check_without_vllm(out / f"afd_plugin-{version}-py3-none-any.whl", scratch, version)
            code = DISCOVER.format(version=version)
            capture([sys.executable, "-c", code], cwd=scratch, env=clean_environment(), timeout_s=300)
            print("beside vLLM: discovered exactly once, registers twice without harm")
            shutil.rmtree(ROOT / "dist", ignore_errors=True)
            shutil.copytree(out, ROOT / "dist")
    except (PackageError, CommandError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _commit_time() -> str:
    return capture(["git", "log", "-1", "--format=%ct"], cwd=ROOT).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
