# SPDX-License-Identifier: Apache-2.0
import itertools
from dataclasses import dataclass
from random import Random

import pytest

from afd_plugin.errors import TopologyRefused
from afd_plugin.plan import StepKind, StepPlan
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


@dataclass(frozen=True)
class Sent:
    """One message as one end sees it: leaders by their rank in their own role's world, tag, and row count."""

    attention_rank: int
    ffn_rank: int
    slot: int
    rows: int


def seen_from_attention(topology: Topology, plan: StepPlan) -> list[Sent]:
    """What the lanes send in stage 0, each knowing its own index only (`AttentionWorkerMixin._connect`)."""
    return [
        Sent(
            topology.lane_ranks(lane)[0],
            topology.group_ranks(topology.group_of(lane))[0],
            topology.slot_of(lane),
            plan.tokens[lane][0],
        )
        for lane in range(topology.attention_dp)
    ]


def seen_from_ffn(topology: Topology, plan: StepPlan) -> list[Sent]:
    """What the groups wait for in stage 0, each knowing its own index only (`FFNService`)."""
    return [
        Sent(topology.lane_ranks(lane)[0], topology.group_ranks(group)[0], slot, rows)
        for group in range(topology.ffn_dp)
        for slot, (lane, rows) in enumerate(
            zip(topology.lanes_of(group), plan.group_rows(topology.lanes_of(group), 0), strict=True)
        )
    ]


def some_plan(topology: Topology, random: Random) -> StepPlan:
    """Unequal, sometimes zero rows."""
    return StepPlan(
        0, StepKind.REAL, tuple((random.choice((0, 1, 3, 7, 64)),) for _ in range(topology.attention_dp))
    )


def test_every_accepted_layout_is_one_bijective_plan_seen_from_both_ends() -> None:
    random = Random(20260728)
    walked = 0
    for topology in filter(accepted, ALL):
        plan = some_plan(topology, random)
        ours, theirs = seen_from_attention(topology, plan), seen_from_ffn(topology, plan)
        assert ours == theirs
        assert len({sent.attention_rank for sent in ours}) == topology.attention_dp
        assert len({(sent.ffn_rank, sent.slot) for sent in theirs}) == topology.attention_dp
        walked += 1
    assert (
        walked == 8 * 8 * 20 * 2 - 8 * 8
    )  # (A_tp, F_tp), (A_dp, F_dp) with F_dp | A_dp, EP; without EP of one rank


def test_in_every_accepted_layout_each_row_goes_to_one_group_and_comes_back_to_its_own_lane() -> None:
    random = Random(4)
    for topology in filter(accepted, ALL):
        plan = some_plan(topology, random)
        rows = {
            lane: [(lane, row) for row in range(plan.tokens[lane][0])]
            for lane in range(topology.attention_dp)
        }
        returned: dict[int, list[tuple[int, int]]] = {}
        for group in range(topology.ffn_dp):
            lanes = topology.lanes_of(group)
            gathered = [row for lane in lanes for row in rows[lane]]
            assert len(gathered) == plan.group_tokens(lanes, 0)
            start = 0
            for lane, count in zip(lanes, plan.group_rows(lanes, 0), strict=True):
                assert lane not in returned
                returned[lane] = gathered[start : start + count]
                start += count
        assert returned == rows


def test_the_lanes_and_groups_of_every_accepted_layout_share_out_all_ranks() -> None:
    for topology in filter(accepted, ALL):
        lanes = [rank for lane in range(topology.attention_dp) for rank in topology.lane_ranks(lane)]
        groups = [rank for group in range(topology.ffn_dp) for rank in topology.group_ranks(group)]
        assert lanes == list(range(topology.attention_ranks))
        assert groups == list(range(topology.ffn_ranks))


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


def test_the_ffns_world_has_all_its_ranks_and_is_flat_on_a_cpu_without_expert_parallelism() -> None:
    for topology in filter(accepted, ALL):
        for device in ("cpu", "cuda"):
            data_parallel, tensor_parallel = topology.ffn_world(device)
            assert data_parallel * tensor_parallel == topology.ffn_ranks
            flat = device == "cpu" and not topology.expert_parallel
            assert (data_parallel, tensor_parallel) == (
                (1, topology.ffn_ranks) if flat else (topology.ffn_dp, topology.ffn_tp)
            )


@pytest.mark.parametrize("name", ["attention_dp", "attention_tp", "ffn_dp", "ffn_tp"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(name: str, size: int) -> None:
    with pytest.raises(TopologyRefused, match=f"{name} is {size}") as refusal:
        Topology(**{name: size}).validate()
    assert refusal.value.reason == "NonPositiveSize"


@pytest.mark.parametrize(
    ("topology", "name", "reference"),
    [
        (Topology(), "1A1F", (1, 1)),
        (Topology(attention_dp=2), "2A1F", (1, 1)),
        (Topology(ffn_tp=2), "1A2F", (2, 1)),
        (Topology(attention_tp=2, ffn_tp=2), "2A2F", (1, 2)),
        (Topology(attention_dp=2, ffn_dp=2), "2A2F", (2, 1)),
        (Topology(attention_dp=4, ffn_dp=2), "4A2F", (2, 1)),
    ],
)
def test_each_required_layout_names_a_native_reference_that_is_equal_to_the_bit(
    topology: Topology, name: str, reference: tuple[int, int]
) -> None:
    topology.validate()
    native = topology.native_reference()
    assert topology.name == name
    assert (native.data_parallel, native.tensor_parallel) == reference
    assert native.bitwise


@pytest.mark.parametrize(
    "topology",
    [Topology(attention_tp=2), Topology(attention_tp=2, ffn_tp=3), Topology(attention_tp=4, ffn_tp=2)],
)
def test_a_layout_that_no_native_one_shards_alike_is_held_to_a_tolerance(topology: Topology) -> None:
    topology.validate()
    native = topology.native_reference()
    assert (native.data_parallel, native.tensor_parallel) == (1, topology.attention_tp)
    assert not native.bitwise


def test_a_bitwise_reference_shards_both_halves_as_the_topology_does() -> None:
    for topology in filter(accepted, ALL):
        native = topology.native_reference()
        assert native.tensor_parallel == topology.attention_tp
        if native.bitwise:
            assert native.data_parallel * native.tensor_parallel == topology.ffn_ranks


def test_a_lane_or_group_that_does_not_exist_is_an_error() -> None:
    topology = Topology(attention_dp=2)
    with pytest.raises(IndexError, match="lane 2"):
        topology.group_of(2)
    with pytest.raises(IndexError, match="group 1"):
        topology.lanes_of(1)
