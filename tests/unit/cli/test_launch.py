# SPDX-License-Identifier: Apache-2.0
"""From options to children: what each child is started with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from afd_plugin.cli.devices import (
    DeviceShare,
    Gpu,
    parse_gpus,
    share_devices,
    threads_per_process,
    visible_gpus,
)
from afd_plugin.cli.launch import attention_child, ffn_children, role_environment
from afd_plugin.cli.options import LaunchOptions
from afd_plugin.cli.run import run_attention, run_ffn, run_serve
from afd_plugin.config import AFDConfig, LinkSettings, Role
from afd_plugin.errors import ConfigRefused
from afd_plugin.supervisor.ports import PortReservation, join_address
from afd_plugin.supervisor.spec import Outcome
from afd_plugin.topology import Topology

LINK = LinkSettings(listen="127.0.0.1:4000", token="secret")


def options(topology: Topology = Topology(), **more: object) -> LaunchOptions:  # noqa: B008  (frozen)
    afd = AFDConfig(Role.ATTENTION, topology)
    return LaunchOptions("model", afd, LINK, "cpu", port=8123, vllm=("--dtype", "bfloat16"), **more)  # type: ignore[arg-type]


def test_the_attention_child_serves_http_with_its_role_and_a_drain() -> None:
    spec = attention_child(options(attention_vllm=("--api-key", "k")), {}, None)
    assert spec.argv[:3] == (sys.executable, "-m", "afd_plugin.cli.attention_main")
    assert json.loads(spec.argv[3])["role"] == "attention"
    assert spec.argv[4:] == (
        *("model", "--host", "127.0.0.1", "--port", "8123", "--dtype", "bfloat16"),
        *("--api-key", "k", "--shutdown-timeout", "40"),
    )
    assert spec.stop_order == 0


def test_the_users_own_shutdown_timeout_stays() -> None:
    spec = attention_child(options(attention_vllm=("--shutdown_timeout=5",)), {}, None)
    assert "--shutdown-timeout" not in spec.argv


def test_on_gpus_one_ffn_child_per_group_joined_as_vllms_offline_data_parallel() -> None:
    topology = Topology(attention_dp=4, ffn_dp=2)
    launch = replace(options(topology), device="cuda")
    first, second = ffn_children(launch, LINK.to_env(), None, master_port=4001)
    assert [first.name, second.name] == ["ffn-0", "ffn-1"]
    assert json.loads(first.argv[3])["role"] == "ffn"
    assert first.env["AFD_LISTEN"] == "127.0.0.1:4000"
    assert second.env["AFD_LISTEN"] == "127.0.0.1:0"
    assert second.env["AFD_PEER"] == "127.0.0.1:4000"
    for group, child in enumerate((first, second)):
        assert child.stop_order == 1
        assert child.env["VLLM_DP_RANK"] == str(group)
        assert child.env["VLLM_DP_SIZE"] == "2"
        assert child.env["VLLM_DP_MASTER_PORT"] == "4001"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("1,2,0", ["1,2,0", "2,1,0"]), ("0", ["0", "0"])],
    ids=["apart", "on-one"],
)
def test_each_ffn_shard_sees_a_gpu_of_its_own_first(visible: str, expected: list[str]) -> None:
    launch = replace(options(Topology(ffn_shards=2)), device="cuda")
    children = ffn_children(launch, {"CUDA_VISIBLE_DEVICES": visible}, None, master_port=4001)
    assert [child.env["CUDA_VISIBLE_DEVICES"] for child in children] == expected


@pytest.mark.parametrize("topology", [Topology(), Topology(attention_dp=4, ffn_dp=2)])
def test_on_a_cpu_all_ffn_groups_are_ranks_of_one_child(topology: Topology) -> None:
    (child,) = ffn_children(options(topology), {}, None, master_port=4001)
    assert not any(name.startswith("VLLM_DP_") for name in child.env)


def test_the_cpu_environment_has_defaults_that_the_user_may_override() -> None:
    env = role_environment(options(), {"OMP_NUM_THREADS": "7", "HOME": "/h"}, LINK, cores=8, processes=2)
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["HOME"] == "/h"
    assert env["VLLM_MLA_DISABLE"] == "1"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert env["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] == "30"
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert env["AFD_TOKEN"] == "secret"
    assert role_environment(options(), {}, LINK, cores=8, processes=2)["OMP_NUM_THREADS"] == "4"


def test_the_secret_and_the_addresses_stay_out_of_the_command_line_and_of_the_hashed_config() -> None:
    spec = attention_child(options(), {}, None)
    assert "secret" not in " ".join(spec.argv)
    assert "4000" not in " ".join(spec.argv)
    assert "secret" not in repr(spec)


def test_on_a_shared_gpu_each_role_takes_its_part_of_the_memory() -> None:
    share = DeviceShare("0", "0", shared=True)
    assert attention_child(options(), {}, share).argv[-2:] == ("--gpu-memory-utilization", "0.45")
    mine = options(ffn_vllm=("--gpu-memory-utilization", "0.2"))
    assert ffn_children(mine, {}, share, 0)[0].argv[-2:] == ("--gpu-memory-utilization", "0.2")


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:5", "127.0.0.1:5"),
        ("0.0.0.0:5", "127.0.0.1:5"),
        ("[::]:5", "[::1]:5"),
        ("[fd00::1]:5", "[fd00::1]:5"),
    ],
)
def test_a_wildcard_is_reached_by_loopback(listen: str, expected: str) -> None:
    beside = LinkSettings(listen=listen, peer="").beside()
    assert beside.peer == expected
    assert beside.listen == listen.rpartition(":")[0] + ":0"


GPUS = (Gpu("0", "GPU-a", 1, 1), Gpu("1", "GPU-b", 1, 1))


@pytest.mark.parametrize(
    ("names", "topology", "expected"),
    [
        (("0", "1"), Topology(), DeviceShare("0", "1", False)),
        (("0", "1", "2", "3"), Topology(attention_dp=2, ffn_tp=2), DeviceShare("0,1", "2,3", False)),
        (("0",), Topology(), DeviceShare("0", "0", True)),
        (("0", "1"), Topology(attention_dp=2), DeviceShare("0,1", "0", True)),
    ],
)
def test_gpus_are_split_between_the_roles(
    names: tuple[str, ...], topology: Topology, expected: DeviceShare
) -> None:
    assert share_devices(names, topology) == expected


def test_too_few_or_duplicate_gpus_are_refused() -> None:
    with pytest.raises(ConfigRefused, match="needs at least 2 GPUs"):
        share_devices(("0",), Topology(attention_dp=2))
    with pytest.raises(ConfigRefused, match="twice"):
        share_devices(("0", "0"), Topology())


def test_the_drivers_table_is_parsed_and_the_users_choice_honoured() -> None:
    assert parse_gpus("0, GPU-a, 143771, 143000\n") == (Gpu("0", "GPU-a", 143771 << 20, 143000 << 20),)
    assert visible_gpus(GPUS, {}) == ("0", "1")
    assert visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": "1"}) == ("1",)
    assert visible_gpus(GPUS, {"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_every_process_gets_a_thread() -> None:
    assert threads_per_process(2, 4) == 1
    assert threads_per_process(9, 2) == 4


def test_a_restart_window_gives_the_only_ffn_child_a_policy_and_steps_a_longer_bound() -> None:
    link = replace(LINK, ffn_restart_window_s=45.0)
    launch = replace(options(Topology(attention_dp=2, ffn_tp=2)), link=link)
    env = role_environment(launch, {}, link, cores=2, processes=2)
    assert env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "345"
    (ffn,) = ffn_children(launch, env, None, master_port=4001)
    assert ffn.restart is not None
    assert (ffn.restart.window, ffn.restart.env) == (45.0, {"AFD_RENDEZVOUS_TIMEOUT": "45.0"})
    assert attention_child(launch, env, None).restart is None
    (never,) = ffn_children(options(), LINK.to_env(), None, master_port=4001)
    assert never.restart is None
    assert "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS" not in role_environment(options(), {}, LINK, 2, 2)


@pytest.mark.parametrize(
    ("run", "code", "returned"),
    [(run_serve, code, 1 if code == 3 else code) for code in range(5)]
    + [(run_attention, 3, 3), (run_ffn, 3, 3)],
)
def test_only_a_launcher_of_one_role_returns_that_the_other_was_lost(
    run: Callable[[LaunchOptions], int], code: int, returned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = SimpleNamespace(run=lambda: Outcome(code))
    monkeypatch.setattr("afd_plugin.cli.run.Supervisor", lambda *_: ended)
    with PortReservation() as control, PortReservation() as http:
        listen = join_address(control.host, control.port)
        port = http.port
    assert run(replace(options(), port=port, link=replace(LINK, listen=listen))) == returned


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cuda"},
        {"afd": AFDConfig(Role.ATTENTION, microbatches=2)},
        {"afd": AFDConfig(Role.ATTENTION, Topology(ffn_shards=2))},
        {"afd": AFDConfig(Role.ATTENTION, Topology(attention_dp=2, independent_lanes=True))},
        {"afd": AFDConfig(Role.ATTENTION, Topology(attention_dp=2, ffn_dp=2))},
    ],
)
def test_a_restart_window_where_no_step_could_go_on_is_refused_before_anything_starts(
    changes: dict[str, Any],
) -> None:
    launch = replace(options(), link=replace(LINK, ffn_restart_window_s=45.0), **changes)
    for run in (run_serve, run_attention, run_ffn):
        with pytest.raises(ConfigRefused, match="--ffn-restart-window"):
            run(launch)
