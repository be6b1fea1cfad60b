# SPDX-License-Identifier: Apache-2.0
"""Device and host memory that outlives torch's allocator: arenas other processes map, words that kernels
poll.

Owned by ``cuda-python`` rather than by torch, because an IPC handle names a whole ``cudaMalloc`` allocation
and torch's allocator hands out parts of them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import runtime

HANDLE_BYTES = 64
GRANULARITY = 2 << 20
"""Allocations are rounded up to this size, so that the driver gives each one a block of its own."""

_UUID_BYTES = 16


def checked(result: tuple[Any, ...]) -> Any:
    """The values of a cuda-python call; ``RuntimeError`` with the runtime's own words if it failed."""
    error, *values = result
    if error != runtime.cudaError_t.cudaSuccess:
        _, text = runtime.cudaGetErrorString(error)
        raise RuntimeError(f"{error.name}: {text.decode() if isinstance(text, bytes) else text}")
    return values[0] if len(values) == 1 else tuple(values)


def device_uuid(device: torch.device) -> str:
    """The identity of ``device`` that is the same in every process, whatever ``CUDA_VISIBLE_DEVICES`` says."""
    properties = checked(runtime.cudaGetDeviceProperties(_ordinal(device)))
    return ctypes.string_at(properties.uuid.getPtr(), _UUID_BYTES).hex()


def _ordinal(device: torch.device) -> int:
    index: int | None = device.index  # None for `torch.device("cuda")`, which torch's own stub denies
    return torch.cuda.current_device() if index is None else index


@dataclass(frozen=True)
class _ArrayInterface:
    """What torch needs to make a tensor over memory it does not own."""

    __cuda_array_interface__: dict[str, object]


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """``size`` bytes of device memory at ``address`` as a flat tensor; the memory must outlive it."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device=device)
    description: dict[str, object] = {
        "shape": (size,),
        "typestr": "|u1",
        "data": (address, False),
        "version": 2,
        "strides": None,
    }
    raw = torch.as_tensor(_ArrayInterface(description), device=device)
    if raw.data_ptr() != address:
        raise RuntimeError("torch copied an arena in the place of viewing it")
    return raw


class DeviceArena:
    """Zeroed device memory that other processes can map."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self.size = -(-size // GRANULARITY) * GRANULARITY
        with torch.cuda.device(device):
            torch.cuda.current_stream(
                device
            ).synchronize()  # the primary context exists and is current from here
            self.address = int(checked(runtime.cudaMalloc(self.size)))
            checked(runtime.cudaMemset(self.address, 0, self.size))
            checked(runtime.cudaDeviceSynchronize())

    def handle(self) -> bytes:
        """The IPC handle of the allocation."""
        exported = checked(runtime.cudaIpcGetMemHandle(self.address))
        return ctypes.string_at(exported.getPtr(), HANDLE_BYTES)

    def close(self) -> None:
        """Free the memory; idempotent."""
        if self.address:
            checked(runtime.cudaFree(self.address))
            self.address = 0


class MappedArena:
    """Another process's arena, mapped into this one."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"an IPC handle of {len(handle)} bytes; {HANDLE_BYTES} were expected")
        imported = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(imported.getPtr(), handle, HANDLE_BYTES)
        with torch.cuda.device(device):
            self.address = int(
                checked(runtime.cudaIpcOpenMemHandle(imported, runtime.cudaIpcMemLazyEnablePeerAccess))
            )

    def close(self) -> None:
        """Unmap; idempotent."""
        if self.address:
            checked(runtime.cudaIpcCloseMemHandle(self.address))
            self.address = 0


class HostWords:
    """A few 64-bit words in pinned host memory that kernels read and write while they run."""

    def __init__(self, count: int) -> None:
        self.address = int(checked(runtime.cudaHostAlloc(8 * count, runtime.cudaHostAllocMapped)))
        self._words = (ctypes.c_uint64 * count).from_address(self.address)
        for index in range(count):
            self._words[index] = 0

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def close(self) -> None:
        """Free the memory; idempotent."""
        if self.address:
            del self._words
            checked(runtime.cudaFreeHost(self.address))
            self.address = 0
