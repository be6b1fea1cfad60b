# SPDX-License-Identifier: Apache-2.0
"""Layouts in which processes of a role share no vLLM world: arithmetic, refusals, configuration."""

from __future__ import annotations

import pytest

from afd_plugin.config import AFDConfig
from afd_plugin.control.membership import expected_members
from afd_plugin.errors import AFDError, ConfigRefused, TopologyRefused
from afd_plugin.topology import Topology


def test_shards_are_members_of_the_ffn_that_all_serve_all_lanes() -> None:
    topology = Topology(attention_dp=2, ffn_shards=3)
    topology.validate()
    assert topology.name == "2A3F"
    assert [str(member) for member in expected_members(topology)] == [
        "attention lane 0", "attention lane 1", "FFN group 0", "FFN group 1", "FFN group 2",
    ]  # fmt: skip
    assert [topology.lanes_of(shard) for shard in range(3)] == [(0, 1)] * 3
    assert [topology.group_of(lane) for lane in range(2)] == [0, 0]
    assert topology.slot_of(1) == 1
    assert {topology.ffn_world(device) for device in ("cpu", "cuda")} == {(1, 1)}
    assert not topology.native_reference().bitwise


def test_independent_engines_are_worlds_of_their_own_for_vllm() -> None:
    topology = Topology(attention_dp=2, attention_tp=2, independent_lanes=True)
    topology.validate()
    assert topology.attention_world == (1, 2)
    assert topology.attention_ranks == 4
    assert Topology(attention_dp=2, attention_tp=2).attention_world == (2, 2)


@pytest.mark.parametrize(
    ("topology", "reason"),
    [
        (Topology(ffn_shards=0), "NonPositiveSize"),
        (Topology(ffn_shards=2, ffn_tp=2), "ShardsOfOneRank"),
        (Topology(attention_dp=2, ffn_dp=2, ffn_shards=2), "ShardsOfOneRank"),
        (Topology(ffn_shards=2, expert_parallel=True), "ShardsOfOneRank"),
        (Topology(attention_dp=2, ffn_dp=2, independent_lanes=True), "IndependentLanesOfOneGroup"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(topology: Topology, reason: str) -> None:
    with pytest.raises(TopologyRefused) as refused:
        topology.validate()
    assert refused.value.reason == reason


def test_a_configuration_survives_its_way_through_vllm() -> None:
    raw = {"role": "ffn", "ffn_shards": 2, "member": 1}
    config = AFDConfig.parse(raw)
    assert (config.member, config.members, config.topology.ffn_shards) == (1, 2, 2)
    assert AFDConfig.parse(config.to_additional_config()) == config
    engine = AFDConfig.parse({"role": "attention", "attention_dp": 3, "independent_lanes": True, "member": 2})
    assert engine.members == 3
    assert AFDConfig.parse({"role": "attention", "attention_dp": 3}).members == 1
    assert AFDConfig.parse({"role": "ffn", "attention_dp": 3, "independent_lanes": True}).members == 1


@pytest.mark.parametrize(
    ("raw", "error", "said"),
    [
        ({"role": "ffn", "ffn_shards": 2, "member": 2}, ConfigRefused, "afd.member is 2"),
        ({"role": "attention", "ffn_shards": 2, "member": 1}, ConfigRefused, "has 1 processes"),
        (
            {"role": "ffn", "ffn_shards": 2, "dense": "ffn"},
            TopologyRefused,
            "dense MLPs have no experts to split",
        ),
        ({"role": "ffn", "attention_tp": 2, "shared": "attention"}, TopologyRefused, "leave them there"),
        ({"role": "ffn", "shared": "gpu"}, ConfigRefused, "afd.shared is 'gpu'"),
        ({"role": "ffn", "ffn_shards": "two"}, ConfigRefused, "expected an integer"),
        ({"role": "attention", "independent_lanes": 1}, ConfigRefused, "expected true or false"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(
    raw: dict[str, object], error: type[AFDError], said: str
) -> None:
    with pytest.raises(error) as refused:
        AFDConfig.parse(raw)
    assert said in str(refused.value)
