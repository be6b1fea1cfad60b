# SPDX-License-Identifier: Apache-2.0
"""Layouts whose processes share no vLLM world, from the command line to the children's configuration."""

from __future__ import annotations

import json

import pytest

from afd_plugin.cli.devices import share_devices
from afd_plugin.cli.launch import attention_child, ffn_children
from afd_plugin.cli.layout import afd_config
from afd_plugin.cli.options import LaunchOptions
from afd_plugin.config import AFDConfig, DensePlacement, GatePlacement, LinkSettings, Role, SharedPlacement
from afd_plugin.errors import ConfigRefused
from afd_plugin.supervisor.spec import ChildSpec

ONES = (1, 1, 1, 1, False)
CHOICES = (GatePlacement.FFN, DensePlacement.ATTENTION, SharedPlacement.FFN, "auto", 1)


def launched(afd: AFDConfig) -> LaunchOptions:
    return LaunchOptions("model", afd, LinkSettings(listen="127.0.0.1:29700"), "cpu")


def written(child: ChildSpec) -> AFDConfig:
    return AFDConfig.parse(json.loads(child.argv[3]))


def test_every_shard_is_a_child_of_its_own_outside_any_data_parallel_world() -> None:
    children = ffn_children(launched(afd_config(Role.ATTENTION, ONES, CHOICES, shards=3)), {}, None, 1234)
    assert [child.name for child in children] == ["ffn-0", "ffn-1", "ffn-2"]
    assert [written(child).member for child in children] == [0, 1, 2]
    assert all("VLLM_DP_SIZE" not in child.env for child in children)
    assert [child.env.get("AFD_PEER", "") for child in children] == ["", "127.0.0.1:29700", "127.0.0.1:29700"]


def test_an_engine_knows_which_it_is_and_the_ffn_how_many_there_are() -> None:
    engine = afd_config(Role.ATTENTION, ONES, CHOICES, engine="1/2")
    assert (engine.member, engine.topology.attention_dp, engine.topology.independent_lanes) == (1, 2, True)
    assert written(attention_child(launched(engine), {}, None)).member == 1
    ffn = afd_config(Role.FFN, ONES, CHOICES, engine=2)
    assert ffn.topology == engine.topology
    (child,) = ffn_children(launched(ffn), {}, None, 1234)
    assert written(child).member == 0


@pytest.mark.parametrize("text", ["2/2", "1", "a/b", "-1/2"])
def test_what_is_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ConfigRefused, match="expected K/N"):
        afd_config(Role.ATTENTION, ONES, CHOICES, engine=text)


def test_lanes_of_one_engine_and_engines_are_not_mixed() -> None:
    with pytest.raises(ConfigRefused, match="leave it out"):
        afd_config(Role.ATTENTION, (2, 1, 1, 1, False), CHOICES, engine="0/2")


def test_shards_share_a_gpu_where_ranks_could_not_and_split_its_memory() -> None:
    topology = afd_config(Role.ATTENTION, ONES, CHOICES, shards=2).topology
    share = share_devices(["0"], topology)
    assert (share.attention, share.ffn, share.shared) == ("0", "0", True)
    assert share.utilisation == pytest.approx(0.3)


def test_arenas_of_two_gpus_are_mapped_where_each_role_sees_both_its_own_first() -> None:
    apart = share_devices(["0", "1"], afd_config(Role.ATTENTION, ONES, CHOICES).topology)
    assert (apart.attention, apart.ffn) == ("0", "1")
    both = apart.seeing_each_other()
    assert (both.attention, both.ffn, both.shared) == ("0,1", "1,0", False)
