# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest

from afd_plugin.errors import TopologyRefused
from afd_plugin.topology import Topology

SIZES = range(1, 9)
ALL = [
    Topology(*sizes, expert_parallel=parallel)
    for sizes in itertools.product(SIZES, SIZES, SIZES, SIZES)
    for parallel in (False, True)
]


def accepted(topology: Topology) -> bool:
    try:
        topology.validate()
    except TopologyRefused:
        return False
    return True


def test_every_accepted_layout_up_to_eight_deals_each_lane_to_exactly_one_group() -> None:
    sound = [topology for topology in ALL if accepted(topology)]
    assert len(sound) > 1000
    for topology in sound:
        dealt = [lane for group in range(topology.ffn_dp) for lane in topology.lanes_of(group)]
        assert dealt == list(range(topology.attention_dp))
        for group in range(topology.ffn_dp):
            assert len(topology.lanes_of(group)) == topology.lanes_per_group
            assert all(topology.group_of(lane) == group for lane in topology.lanes_of(group))


def test_every_refusal_up_to_eight_has_a_reason_and_every_reason_is_earned() -> None:
    reasons: set[str] = set()
    for topology in ALL:
        earned = {
            "GroupWithoutLane": topology.ffn_dp > topology.attention_dp,
            "UnevenLanes": topology.attention_dp % topology.ffn_dp != 0,
            "ExpertParallelOfOne": topology.expert_parallel and topology.ffn_ranks == 1,
        }
        if any(earned.values()):
            with pytest.raises(TopologyRefused) as refusal:
                topology.validate()
            assert earned[refusal.value.reason]
            reasons.add(refusal.value.reason)
        else:
            topology.validate()
    assert reasons == {"GroupWithoutLane", "UnevenLanes", "ExpertParallelOfOne"}


@pytest.mark.parametrize("name", ["attention_dp", "attention_tp", "ffn_dp", "ffn_tp"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(name: str, size: int) -> None:
    with pytest.raises(TopologyRefused, match=f"{name} is {size}") as refusal:
        Topology(**{name: size}).validate()
    assert refusal.value.reason == "NonPositiveSize"


@pytest.mark.parametrize(
    ("topology", "name", "bitwise"),
    [
        (Topology(), "1A1F", True),
        (Topology(attention_dp=2), "2A1F", True),
        (Topology(ffn_tp=2), "1A2F", False),
        (Topology(attention_tp=2, ffn_tp=2), "2A2F", True),
        (Topology(attention_dp=2, ffn_dp=2), "2A2F", True),
        (Topology(attention_dp=4, ffn_dp=2), "4A2F", False),
    ],
)
def test_each_required_layout_names_its_native_reference(
    topology: Topology, name: str, bitwise: bool
) -> None:
    topology.validate()
    reference = topology.native_reference()
    assert topology.name == name
    assert (reference.data_parallel, reference.tensor_parallel) == (
        topology.attention_dp,
        topology.attention_tp,
    )
    assert reference.bitwise is bitwise


def test_a_lane_or_group_that_does_not_exist_is_an_error() -> None:
    topology = Topology(attention_dp=2)
    with pytest.raises(IndexError, match="lane 2"):
        topology.group_of(2)
    with pytest.raises(IndexError, match="group 1"):
        topology.lanes_of(1)
