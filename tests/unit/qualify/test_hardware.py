# SPDX-License-Identifier: Apache-2.0
"""What the identity reads of a GPU host: the driver library stands in, since a unit test has none."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qualify import identity
from qualify.identity import Device


class NvmlError(Exception):
    """The stand-in's own error class, as the real module has one."""


def nvml(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Put a driver library with two GPUs in place of the real one."""
    module = ModuleType("cuda.bindings.nvml")
    functions: dict[str, Any] = {
        "NvmlError": NvmlError,
        "init_v2": lambda: None,
        "device_get_count_v2": lambda: 2,
        "device_get_handle_by_index_v2": lambda index: index,
        "device_get_cuda_compute_capability": lambda handle: (9, 0),
        "device_get_name": lambda handle: "NVIDIA H200",
        "device_get_uuid": lambda handle: f"GPU-{handle}",
        "system_get_driver_version": lambda: "580.159.04",
    }
    vars(module).update(functions | changes)
    package = ModuleType("cuda.bindings")
    vars(package)["nvml"] = module
    for name, found in (
        ("cuda", ModuleType("cuda")),
        ("cuda.bindings", package),
        ("cuda.bindings.nvml", module),
    ):
        monkeypatch.setitem(sys.modules, name, found)


def test_every_device_is_read_with_name_uuid_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the driver's order, with the driver's version."""
    nvml(monkeypatch)
    devices = tuple(Device("NVIDIA H200", f"GPU-{index}", "9.0") for index in range(2))
    assert identity._nvml() == ("580.159.04", devices)


def _raises(error: Exception) -> Any:
    def raising() -> None:
        raise error

    return raising


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("no library"), "not used"), (NvmlError("version mismatch"), "UNKNOWN")]
)
def test_a_host_without_a_driver_uses_none_and_one_whose_driver_fails_is_unknown(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UNKNOWN blocks a GPU cell; it is never taken for a host without a GPU."""
    nvml(monkeypatch, init_v2=_raises(error))
    assert identity._nvml() == (said, ())
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert identity._nvml() == ("not used", ())


def test_an_nccl_that_is_mapped_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Package metadata may say another version than the library that the process holds."""

    class Library:
        def __init__(self, path: str) -> None:
            assert path == "/a/libnccl.so.2"

        def ncclGetVersion(self, target: Any) -> int:  # noqa: N802 (NCCL's own name)
            target._obj.value = 22907
            return 0

    monkeypatch.setattr(identity.ctypes, "CDLL", Library)
    assert identity._mapped_nccl("7f r-xp 0 0 0 /a/libnccl.so.2\n") == "2.29.7"
    monkeypatch.setattr(Library, "ncclGetVersion", lambda self, target: 1)
    assert identity._mapped_nccl("7f r-xp 0 0 0 /a/libnccl.so.2\n") == "UNKNOWN"


def test_a_native_file_that_is_not_the_one_of_its_wheel_is_named_and_changes_the_digest(
    tmp_path: Path,
) -> None:
    """Digest and record are over the bytes that lie there now."""
    info = tmp_path / "x-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: x\nVersion: 1\n", encoding="utf-8")
    (tmp_path / "x.so").write_bytes(b"native")
    recorded = base64.urlsafe_b64encode(hashlib.sha256(b"native").digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"x.so,sha256={recorded},6\nx.py,,\n", encoding="utf-8")
    found = importlib.metadata.PathDistribution(info)
    before, altered = identity._native_files(found)
    assert altered == ()
    (tmp_path / "x.so").write_bytes(b"patched")
    after, altered = identity._native_files(importlib.metadata.PathDistribution(info))
    assert altered == ("x.so",)
    assert before != after


def test_a_host_without_a_compiler_uses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell's wheels need none, so its absence is a fact and no gap."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert identity._compiler() == "not used"
