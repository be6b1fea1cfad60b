# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from afd_plugin.config import AFDConfig, DensePlacement, GatePlacement, LinkSettings, Role
from afd_plugin.errors import AFDError, ConfigRefused, TopologyRefused
from afd_plugin.topology import Topology

FULL = AFDConfig(
    Role.FFN,
    topology=Topology(4, 1, 2, 2, expert_parallel=True),
    gate=GatePlacement.ATTENTION,
    dense=DensePlacement.FFN,
    connector="CudaIpcAFDConnector",
    microbatches=2,
)


@pytest.mark.parametrize("config", [AFDConfig(Role.ATTENTION), FULL])
def test_a_config_survives_the_trip_through_additional_config(config: AFDConfig) -> None:
    assert AFDConfig.parse(config.to_additional_config()) == config


def test_what_is_hashed_into_the_compile_cache_holds_no_address_and_no_secret() -> None:
    plain = FULL.to_additional_config()
    assert not {"listen", "peer", "advertise", "token"} & plain.keys()
    assert all(isinstance(value, (str, int, bool)) for value in plain.values())


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ([], "expected a mapping"),
        ({}, "afd.role is missing"),
        ({"role": "decode"}, "expected one of 'attention', 'ffn'"),
        ({"role": "ffn", "gates": "ffn"}, "Unknown key afd.gates"),
        ({"role": "ffn", "gate": "both"}, "afd.gate is 'both'"),
        ({"role": "ffn", "dense": 1}, "afd.dense is 1"),
        ({"role": "ffn", "connector": "Pigeon"}, "expected one of Tcp"),
        ({"role": "ffn", "ffn_tp": 0}, "expected at least 1"),
        ({"role": "ffn", "attention_dp": -3}, "expected at least 1"),
        ({"role": "ffn", "attention_dp": True}, "expected an integer"),
        ({"role": "ffn", "attention_dp": "2"}, "expected an integer"),
        ({"role": "ffn", "expert_parallel": "yes"}, "expected true or false"),
        ({"role": "ffn", "microbatches": 3}, "one or two stages"),
        ({"role": "ffn", "ffn_dp": 2}, "nobody to serve"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence_that_names_it(raw: object, told: str) -> None:
    with pytest.raises(AFDError) as refusal:
        AFDConfig.parse(raw)
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_link_settings_survive_the_trip_through_the_environment() -> None:
    settings = LinkSettings(listen="[::1]:0", peer="host:1", token="t", failure_timeout_s=2.5)
    assert LinkSettings.from_env(settings.to_env()) == settings
    assert LinkSettings.from_env({}) == LinkSettings()


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(LinkSettings(token="secret"))


@pytest.mark.parametrize("raw", ["soon", "0", "-1", "inf", "nan"])
def test_a_time_bound_that_is_no_bound_is_refused(raw: str) -> None:
    with pytest.raises(ConfigRefused, match="AFD_FAILURE_TIMEOUT"):
        LinkSettings.from_env({"AFD_FAILURE_TIMEOUT": raw})


def test_the_restart_window_may_be_off() -> None:
    assert LinkSettings.from_env({"AFD_FFN_RESTART_WINDOW": "0"}).ffn_restart_window_s == 0
    assert LinkSettings.from_env({"AFD_FFN_RESTART_WINDOW": "60"}).ffn_restart_window_s == 60
    for raw in ("-1", "inf", "soon"):
        with pytest.raises(ConfigRefused, match="AFD_FFN_RESTART_WINDOW"):
            LinkSettings.from_env({"AFD_FFN_RESTART_WINDOW": raw})


def test_importing_the_package_and_its_core_loads_nothing_heavy() -> None:
    program = (
        "import sys, afd_plugin, afd_plugin.config, afd_plugin.topology, afd_plugin.plan, afd_plugin.seams;"
        "afd_plugin.register(); afd_plugin.register();"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'vllm', 'zmq', 'numpy', 'pydantic'}))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=30
    )
    assert shown.stdout.strip() == "[]"


def test_ffn_replicas_that_share_no_world_are_refused_by_name() -> None:
    with pytest.raises(TopologyRefused, match="start one service for each") as refusal:
        AFDConfig.parse({"role": "ffn", "ffn_replicas": 2})
    assert refusal.value.reason == "SeparateFFNWorlds"
    assert AFDConfig.parse({"role": "ffn", "ffn_replicas": 1}) == AFDConfig(Role.FFN)
