# SPDX-License-Identifier: Apache-2.0
"""From options to children: pure functions that build the command line and environment of each child."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace

from afd_plugin.cli.devices import VISIBLE_DEVICES, DeviceShare, shard_devices, threads_per_process
from afd_plugin.cli.flags import given
from afd_plugin.cli.options import LaunchOptions
from afd_plugin.config import LinkSettings, Role
from afd_plugin.observability.metrics import DIRECTORY_VARIABLE
from afd_plugin.observability.status import STATUS_VARIABLE
from afd_plugin.supervisor.spec import ChildSpec, RestartPolicy
from afd_plugin.v1.refusals import V2_RUNNER_VARIABLE

WORKER_GRACE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
STEP_BOUND = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
VLLM_STEP_BOUND_S = 300
VLLM_BEHIND_S = 10
"""vLLM's own end of a drain comes so long after ours: it kills the engine and says nothing to those who still wait."""

DEBUG_VARIABLE = "AFD_DEBUG"
METRICS = {DIRECTORY_VARIABLE: "metrics"}
"""Each child's processes leave their metrics in a folder that lives as long as the child."""


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
    if link.ffn_restart_window_s:  # vLLM would give up a step that is held for longer than its own bound
        defaults[STEP_BOUND] = str(int(VLLM_STEP_BOUND_S + link.ffn_restart_window_s))
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
        words += ["--shutdown-timeout", str(int(options.link.drain_timeout_s + VLLM_BEHIND_S))]
    words += _memory(extra, share)
    command = _command(options, Role.ATTENTION, words, options.afd.member)
    return ChildSpec("attention-0", command, env, stop_order=0, scratch=METRICS)


def ffn_children(
    options: LaunchOptions, env: Mapping[str, str], share: DeviceShare | None, master_port: int
) -> tuple[ChildSpec, ...]:
    """One child per data-parallel rank of the FFN's world, or per shard; the first hosts the rendezvous, others listen
    beside it.

    Args:
        master_port: Where several children join vLLM's own data-parallel world; unused for one.
    """
    extra = options.arguments(Role.FFN)
    words = [*extra, *_memory(extra, share)]
    topology = options.afd.topology
    world, _ = topology.ffn_world(options.device)
    size = max(world, topology.ffn_shards)
    children = []
    for rank in range(size):
        own = {
            **env,
            STATUS_VARIABLE: options.status if not rank else f"{options.status.rpartition(':')[0]}:0",
        }
        if rank:
            own.update(options.link.beside().to_env())
        if topology.ffn_shards > 1 and VISIBLE_DEVICES in env:
            own[VISIBLE_DEVICES] = shard_devices(env[VISIBLE_DEVICES], rank)
        if world > 1:
            own.update(
                VLLM_DP_SIZE=str(world),
                VLLM_DP_RANK=str(rank),
                VLLM_DP_RANK_LOCAL=str(rank),
                VLLM_DP_MASTER_IP="127.0.0.1",
                VLLM_DP_MASTER_PORT=str(master_port),
            )
        restart = restart_policy(options.link) if size == 1 else None
        member = rank if topology.ffn_shards > 1 else 0
        command = _command(options, Role.FFN, words, member)
        children.append(
            ChildSpec(f"ffn-{rank}", command, own, stop_order=1, scratch=METRICS, restart=restart)
        )
    return tuple(children)


def restart_policy(link: LinkSettings) -> RestartPolicy | None:
    """How a failed FFN is started again: attention is there already, or will not come within the window."""
    if not link.ffn_restart_window_s:
        return None
    again = replace(link, rendezvous_timeout_s=min(link.rendezvous_timeout_s, link.ffn_restart_window_s))
    variable = LinkSettings.variable("rendezvous_timeout_s")
    return RestartPolicy(link.ffn_restart_window_s, env={variable: again.to_env()[variable]})


def _command(options: LaunchOptions, role: Role, words: list[str], member: int) -> tuple[str, ...]:
    afd = replace(options.for_role(role), member=member)
    config = json.dumps(afd.to_additional_config(), sort_keys=True)
    return (sys.executable, "-m", f"afd_plugin.cli.{role.value}_main", config, options.model, *words)


def _memory(extra: tuple[str, ...], share: DeviceShare | None) -> list[str]:
    """On GPUs that both roles share, each may take its part only, unless the user said otherwise."""
    if share is None or not share.shared or given(extra, "--gpu-memory-utilization"):
        return []
    return ["--gpu-memory-utilization", f"{share.utilisation:.2f}"]
