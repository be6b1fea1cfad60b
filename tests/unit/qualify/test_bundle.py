# SPDX-License-Identifier: Apache-2.0
"""The offline bundle, on a small tree: what is packed arrives, and what was altered on the way is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from qualify import environment, locks
from qualify.bundle import __main__ as command
from qualify.bundle import pack, unpack
from qualify.cells import ROOT, load


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A package with random bytes, a program with its run bit, a link, a library, and what is not packed."""
    root = tmp_path / "site"
    for name, content in {
        "pkg/__init__.py": b"NAME = 'pkg'\n",
        "pkg/data.bin": os.urandom(50_000),
        "pkg/__pycache__/x.pyc": b"stale",
        "nvidia/nccl/lib/libnccl.so.2": b"elf",
        "pkg/bin/tool": b"#!/bin/sh\necho ran\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "pkg/bin/tool").chmod(0o755)
    (root / "pkg/link").symlink_to("data.bin")
    return root


def packed(site: Path, out: Path, **options: object) -> dict[str, object]:
    return pack.pack(site, out, 10_000, compression="gz", version=sys.version_info[:2], **options)  # type: ignore[arg-type]


def test_what_was_packed_arrives_with_run_bits_and_links(site: Path, tmp_path: Path) -> None:
    manifest = packed(site, tmp_path / "out")
    assert len(manifest["parts"]) > 4  # type: ignore[arg-type]
    assert all(part["bytes"] <= 10_000 for part in manifest["parts"])  # type: ignore[attr-defined]
    script = tmp_path / "out" / "unpack.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", script, tmp_path / "out", tmp_path / "cell"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "5 files unpacked" in done.stdout
    cell = tmp_path / "cell" / "site"
    assert (cell / "pkg/data.bin").read_bytes() == (site / "pkg/data.bin").read_bytes()
    assert (cell / "pkg/link").readlink() == Path("data.bin")
    assert (
        subprocess.run([cell / "pkg/bin/tool"], capture_output=True, timeout=10, check=True).stdout
        == b"ran\n"
    )
    assert not (cell / "pkg/__pycache__/x.pyc").exists(), "what is made anew is not packed"
    assert list((cell / "pkg/__pycache__").glob("__init__.*.pyc")), "byte-code is made once, here"
    ask = "import importlib.util, pkg; print(importlib.util.find_spec('pytest'), pkg.NAME)"
    shell = f'. {tmp_path}/cell/activate; echo $LD_LIBRARY_PATH; python3 -c "{ask}"'
    seen = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=True).stdout
    assert seen.splitlines()[-1] == "None pkg", "the host's interpreter, and none of the host's packages"
    assert f"{cell}/nvidia/nccl/lib" in seen


def test_parts_in_folders_of_their_own_are_found(site: Path, tmp_path: Path) -> None:
    packed(site, tmp_path / "out")
    for index, path in enumerate(sorted((tmp_path / "out").glob("part.*"))):
        (tmp_path / "out" / f"{index:02d}").mkdir()
        path.rename(tmp_path / "out" / f"{index:02d}" / path.name)
    assert unpack.unpack(tmp_path / "out", tmp_path / "cell")["files"] == 5


@pytest.mark.parametrize(("fault", "said"), [
    ("flip", "part.002 is not what was packed"),
    ("cut", "part.002 has"),
    ("lose", "part.002 is there 0 times"),
    ("swap", "part.002 is not what was packed"),
])  # fmt: skip
def test_a_part_that_is_not_what_was_packed_is_refused_before_anything_is_written(
    site: Path, tmp_path: Path, fault: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(site, tmp_path / "out")
    part = tmp_path / "out" / "part.002"
    content = bytearray(part.read_bytes())
    if fault == "flip":
        content[5000] ^= 1
        part.write_bytes(content)
    elif fault == "cut":
        part.write_bytes(content[:-1])
    elif fault == "lose":
        part.unlink()
    else:
        part.write_bytes((tmp_path / "out" / "part.001").read_bytes())
    assert unpack.main([str(tmp_path / "out"), str(tmp_path / "cell")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "cell").exists()
    assert command.main(["verify", str(tmp_path / "out")]) == 1


def test_a_second_pack_of_the_same_tree_is_equal_byte_by_byte(site: Path, tmp_path: Path) -> None:
    first = pack.pack(site, tmp_path / "a", 10_000)
    os.utime(site / "pkg/data.bin", (1, 1))
    assert pack.pack(site, tmp_path / "b", 10_000)["sha256"] == first["sha256"]


def test_a_python_that_does_not_fit_is_refused_unless_one_is_packed(site: Path, tmp_path: Path) -> None:
    packed(site, tmp_path / "out")
    with pytest.raises(unpack.BundleError, match=r"this is Python 3\.9"):
        unpack.unpack(tmp_path / "out", tmp_path / "cell", running=(3, 9))
    interpreter = tmp_path / "py" / "bin" / "python3"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text("#!/bin/sh\n")
    packed(site, tmp_path / "with", python=tmp_path / "py")
    unpack.unpack(tmp_path / "with", tmp_path / "cell", running=(3, 9))
    assert (tmp_path / "cell" / "python" / "bin" / "python3").is_file()
    assert "/python/bin" in (tmp_path / "cell" / "activate").read_text()


def test_a_name_that_leads_out_of_the_folder_is_refused(site: Path, tmp_path: Path) -> None:
    packed(site, tmp_path / "out")
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w") as archive:
        archive.add(site / "pkg/__init__.py", "../outside.py")
    for old in (tmp_path / "out").glob("part.*"):
        old.unlink()
    target = tmp_path / "out" / "part.000"
    target.write_bytes(evil.read_bytes())
    manifest = json.loads((tmp_path / "out" / unpack.MANIFEST).read_text())
    manifest["parts"] = [
        {"name": "part.000", "bytes": target.stat().st_size, "sha256": unpack.digest(target)}
    ]
    (tmp_path / "out" / unpack.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(unpack.BundleError, match="outside its folder"):
        unpack.unpack(tmp_path / "out", tmp_path / "cell")
    assert not (tmp_path / "outside.py").exists()
    assert not (tmp_path / "cell").exists()


def test_nothing_is_overwritten(site: Path, tmp_path: Path) -> None:
    packed(site, tmp_path / "out")
    with pytest.raises(unpack.BundleError, match="not empty"):
        packed(site, tmp_path / "out")
    (tmp_path / "cell").mkdir()
    with pytest.raises(unpack.BundleError, match="exists already"):
        unpack.unpack(tmp_path / "out", tmp_path / "cell")


def test_a_site_is_filled_with_exactly_what_the_cuda_lock_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes, no dependency beside them, wheels but for plain Python, for the Python and the C library of the cell."""
    said = tmp_path / "said"
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" > {said}\n', encoding="utf-8")
    uv.chmod(0o755)
    monkeypatch.setattr(environment, "find_uv", lambda _: (str(uv),))
    assert command.main(["install", "--site", str(tmp_path / "site")]) == 0
    words = said.read_text(encoding="utf-8").split()
    assert words[:2] == ["pip", "install"]
    assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(words)
    assert words[words.index("--python-platform") + 1] == "x86_64-manylinux_2_31"
    for cell in (load("h200x1"), load("h200x2")):
        assert cell.glibc_min == pack.GLIBC
        assert words[words.index("--python-version") + 1] in cell.python
        assert words[words.index("--requirement") + 1] == str(ROOT / cell.locks[0])
    assert set(pack.PURE_SOURCES) <= {pin.name for pin in locks.parse(locks.CUDA_LOCK.read_text())}
