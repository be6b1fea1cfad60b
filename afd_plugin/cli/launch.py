# SPDX-License-Identifier: Apache-2.0
"""From options to children: pure functions that build the command line and environment of each child."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace

from afd_plugin.cli.devices import SHARED_UTILISATION, VISIBLE_DEVICES, DeviceShare, threads_per_process
from afd_plugin.cli.flags import given
from afd_plugin.cli.options import LaunchOptions
from afd_plugin.config import LinkSettings, Role
from afd_plugin.supervisor.spec import ChildSpec
from afd_plugin.v1.refusals import V2_RUNNER_VARIABLE

WORKER_GRACE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
DEBUG_VARIABLE = "AFD_DEBUG"
_WILDCARDS = ("0.0.0.0", "[::]", "*")  # noqa: S104  (compared with, not bound)


def role_environment(
    options: LaunchOptions,
    env: Mapping[str, str],
    link: LinkSettings,
    cores: int,
    processes: int,
    visible: str | None = None,
) -> dict[str, str]:
    """The environment of one role's children. What the user has set stays, but for AFD's own variables.

    Args:
        cores: CPU cores that the workers on this host share.
        processes: Number of these workers, both roles together.
        visible: The role's GPUs, or None to leave them as they are.
    """
    defaults = {
        WORKER_GRACE: str(max(5, int(link.drain_timeout_s))),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONUNBUFFERED": "1",
    }
    if options.device == "cpu":
        defaults.update(
            VLLM_TARGET_DEVICE="cpu",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_MLA_DISABLE="1",  # vLLM 0.28.0 cannot select an MLA prefill backend on CPU
            OMP_NUM_THREADS=str(threads_per_process(cores, processes)),
        )
    result = {**defaults, **env, **link.to_env(), V2_RUNNER_VARIABLE: "0"}
    if visible is not None:
        result[VISIBLE_DEVICES] = visible
    if options.debug:
        result[DEBUG_VARIABLE] = "1"
    return result


def attention_child(options: LaunchOptions, env: Mapping[str, str], share: DeviceShare | None) -> ChildSpec:
    """The child that serves HTTP and runs the attention role."""
    extra = options.arguments(Role.ATTENTION)
    words = ["--host", options.host, "--port", str(options.port), *extra]
    if not given(extra, "--shutdown-timeout"):
        words += ["--shutdown-timeout", str(int(options.link.drain_timeout_s))]
    words += _memory(extra, share)
    return ChildSpec("attention-0", _command(options, Role.ATTENTION, words), env, stop_order=0)


def ffn_children(
    options: LaunchOptions, env: Mapping[str, str], share: DeviceShare | None, master_port: int
) -> tuple[ChildSpec, ...]:
    """One child per FFN group; group 0 hosts the rendezvous, the others listen beside it.

    Args:
        master_port: Where the groups of more than one join vLLM's own data-parallel world; unused for one
    group.
    """
    extra = options.arguments(Role.FFN)
    command = _command(options, Role.FFN, [*extra, *_memory(extra, share)])
    groups = options.afd.topology.ffn_dp
    children = []
    for group in range(groups):
        own = dict(env)
        if group:
            host = options.link.listen.rpartition(":")[0]
            link = replace(options.link, listen=f"{host}:0", peer=reachable(options.link.listen))
            own.update(link.to_env())
        if groups > 1:
            own.update(
                VLLM_DP_SIZE=str(groups),
                VLLM_DP_RANK=str(group),
                VLLM_DP_RANK_LOCAL=str(group),
                VLLM_DP_MASTER_IP="127.0.0.1",
                VLLM_DP_MASTER_PORT=str(master_port),
            )
        children.append(ChildSpec(f"ffn-{group}", command, own, stop_order=1))
    return tuple(children)


def reachable(listen: str) -> str:
    """An address by which a process on this host reaches ``listen``: loopback for a wildcard."""
    host, _, port = listen.rpartition(":")
    if host in _WILDCARDS:
        return f"[::1]:{port}" if host == "[::]" else f"127.0.0.1:{port}"
    return listen


def _command(options: LaunchOptions, role: Role, words: list[str]) -> tuple[str, ...]:
    config = json.dumps(options.for_role(role).to_additional_config(), sort_keys=True)
    return (sys.executable, "-m", f"afd_plugin.cli.{role.value}_main", config, options.model, *words)


def _memory(extra: tuple[str, ...], share: DeviceShare | None) -> list[str]:
    """On GPUs that both roles share, each may take its part only, unless the user said otherwise."""
    if share is None or not share.shared or given(extra, "--gpu-memory-utilization"):
        return []
    return ["--gpu-memory-utilization", SHARED_UTILISATION]
