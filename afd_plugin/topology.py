# SPDX-License-Identifier: Apache-2.0
"""Who talks to whom: pure arithmetic over (A_dp, A_tp, F_dp, F_tp, EP).

A *lane* is one attention data-parallel rank. Its tensor-parallel ranks hold identical hidden states at the hand-off
(the output projection is already reduced), so one copy crosses, sent by the lane's TP rank 0. A *group* is one FFN
data-parallel rank; its TP rank 0 receives and hands the rows to the others inside vLLM's own world. Lanes are dealt to
groups in equal, consecutive blocks. Without expert parallelism vLLM flattens the FFN's DP into the TP of its experts.

Two layouts have processes of one role that share no vLLM world. *Independent lanes* are attention engines of their
own, each with its own requests, that one FFN serves in turn. *Expert shards* are FFN processes that each hold a part of
every layer's experts; every lane sends its rows to all of them and adds their partial outputs. Each shard is a group of
its own towards the control plane, and all of them serve all lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

from afd_plugin.errors import TopologyRefused


@dataclass(frozen=True)
class NativeReference:
    """The native vLLM layout a topology is compared with, lane by lane.

    ``bitwise`` says that both shard attention and experts alike, so that a lane's answers are equal to the bit wherever
    both run the same batches; otherwise the tolerance is the largest native-versus-native difference of the same run.
    """

    data_parallel: int
    tensor_parallel: int
    expert_parallel: bool
    bitwise: bool


@dataclass(frozen=True)
class Topology:
    """Parallel sizes of both roles. Construct freely, then :meth:`validate` before any socket is opened."""

    attention_dp: int = 1
    attention_tp: int = 1
    ffn_dp: int = 1
    ffn_tp: int = 1
    expert_parallel: bool = False
    independent_lanes: bool = False
    """Whether each lane is an attention engine of its own, with no data-parallel peers in vLLM's sense."""

    ffn_shards: int = 1
    """FFN processes without a common vLLM world among which the experts of every layer are split."""

    def validate(self) -> None:
        """Raise :class:`~afd_plugin.errors.TopologyRefused` with a named reason for an unsound layout."""
        for name in ("attention_dp", "attention_tp", "ffn_dp", "ffn_tp", "ffn_shards"):
            size = getattr(self, name)
            if size < 1:
                raise TopologyRefused("NonPositiveSize", f"{name} is {size}; parallel sizes start at 1.")
        if self.ffn_dp > self.attention_dp:
            raise TopologyRefused(
                "GroupWithoutLane",
                f"{self.ffn_dp} FFN groups for {self.attention_dp} attention lanes leave a group with nobody to serve; "
                "lower --ffn-dp or use --ffn-tp to spread the experts.",
            )
        if self.attention_dp % self.ffn_dp:
            raise TopologyRefused(
                "UnevenLanes",
                f"{self.attention_dp} attention lanes cannot be dealt evenly to {self.ffn_dp} FFN groups; "
                "--attention-dp must be a multiple of --ffn-dp.",
            )
        if self.ffn_shards > 1 and (self.ffn_dp > 1 or self.ffn_tp > 1 or self.expert_parallel):
            raise TopologyRefused(
                "ShardsOfOneRank",
                f"{self.ffn_shards} FFN shards share no vLLM world, so each is one rank; drop --ffn-dp, --ffn-tp and "
                "--ffn-ep, or --ffn-shards.",
            )
        if self.independent_lanes and self.ffn_dp > 1:
            raise TopologyRefused(
                "IndependentLanesOfOneGroup",
                f"independent attention engines run no common step, which {self.ffn_dp} FFN groups of one world need; "
                "use --ffn-dp 1.",
            )
        if self.expert_parallel and self.ffn_ranks == 1:
            raise TopologyRefused(
                "ExpertParallelOfOne", "expert parallelism needs at least two FFN ranks; drop --ffn-ep."
            )

    @property
    def attention_ranks(self) -> int:
        return self.attention_dp * self.attention_tp

    @property
    def ffn_ranks(self) -> int:
        return self.ffn_dp * self.ffn_tp * self.ffn_shards

    @property
    def ffn_members(self) -> int:
        """FFN processes that take part in the control plane: leaders of groups, or shards."""
        return self.ffn_dp * self.ffn_shards

    @property
    def one_ffn(self) -> bool:
        """Whether one FFN group runs every step, for all lanes together."""
        return self.ffn_members == 1 and not self.independent_lanes

    @property
    def attention_world(self) -> tuple[int, int]:
        """The vLLM world of one attention engine as (data parallel, tensor parallel) size."""
        return 1 if self.independent_lanes else self.attention_dp, self.attention_tp

    @property
    def lanes_per_group(self) -> int:
        return self.attention_dp // self.ffn_dp

    @property
    def name(self) -> str:
        """The short form used in recipes and evidence, for example ``2A1F``."""
        return f"{self.attention_ranks}A{self.ffn_ranks}F"

    def group_of(self, lane: int) -> int:
        """The FFN group that serves ``lane``; of several shards the first, which leads them."""
        self._check("lane", lane, self.attention_dp)
        return lane // self.lanes_per_group

    def lanes_of(self, group: int) -> tuple[int, ...]:
        """The lanes that ``group`` serves, in the order in which their rows are laid out."""
        self._check("group", group, self.ffn_members)
        if self.ffn_shards > 1:
            return tuple(range(self.attention_dp))
        first = group * self.lanes_per_group
        return tuple(range(first, first + self.lanes_per_group))

    def slot_of(self, lane: int) -> int:
        """The position of ``lane`` among the lanes of its group: whose rows come how far behind."""
        return lane - self.lanes_of(self.group_of(lane))[0]

    def lane_ranks(self, lane: int) -> tuple[int, ...]:
        """Ranks of ``lane`` in the attention role's vLLM world, its leader first."""
        self._check("lane", lane, self.attention_dp)
        return tuple(range(lane * self.attention_tp, (lane + 1) * self.attention_tp))

    def group_ranks(self, group: int) -> tuple[int, ...]:
        """Ranks of ``group`` in the FFN role's vLLM world, its leader first."""
        self._check("group", group, self.ffn_dp)
        return tuple(range(group * self.ffn_tp, (group + 1) * self.ffn_tp))

    def ffn_world(self, device: str) -> tuple[int, int]:
        """The FFN's vLLM world on ``device`` as (data parallel, tensor parallel) size; always ``ffn_ranks`` in all.

        Without expert parallelism vLLM flattens DP into the TP of the experts, and needs an all-gather of unequal
        parts for it. vLLM 0.28.0's CPU communicator has none (``all_gatherv``), so there the world is flat from the
        start: the same shards, and the groups share their rows by broadcasts of their own.
        """
        if self.ffn_shards > 1:
            return 1, 1
        if device == "cpu" and not self.expert_parallel:
            return 1, self.ffn_ranks
        return self.ffn_dp, self.ffn_tp

    def native_reference(self) -> NativeReference:
        """The native layout whose results this topology must reproduce (design section 6).

        Natively the experts are sharded over DP x TP ranks, so the layout that shards both halves as this one does has
        the attention's TP and as many ranks as the FFN. It exists where the attention's TP divides the FFN's ranks.
        """
        if self.ffn_shards > 1:  # no native layout adds partial outputs of whole experts without a collective
            return NativeReference(1, self.attention_tp, False, bitwise=False)
        data_parallel, rest = divmod(self.ffn_ranks, self.attention_tp)
        if rest or not data_parallel:
            return NativeReference(1, self.attention_tp, self.expert_parallel, bitwise=False)
        return NativeReference(data_parallel, self.attention_tp, self.expert_parallel, bitwise=True)

    @staticmethod
    def _check(what: str, index: int, size: int) -> None:
        if not 0 <= index < size:
            raise IndexError(f"{what} {index} does not exist; there are {size}.")
