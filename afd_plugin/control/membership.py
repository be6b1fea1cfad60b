# SPDX-License-Identifier: Apache-2.0
"""What a member knows after the handshake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from afd_plugin.config import Role
from afd_plugin.control.messages import Member, MemberId
from afd_plugin.topology import Topology


@dataclass(frozen=True)
class Membership:
    """One life of the service, as agreed at the rendezvous.

    Attributes:
        me: Which member this process is.
        epoch: Random number of this life; every message carries it.
        members: All members, attention lanes first, each by index.
    """

    me: MemberId
    epoch: int
    members: tuple[Member, ...]

    def member(self, role: Role, index: int) -> Member:
        """The directory entry of one member; ``KeyError`` when the topology has no such member."""
        for member in self.members:
            if member.id == MemberId(role, index):
                return member
        raise KeyError(f"{MemberId(role, index)} is no member")

    def group(self, index: int) -> Member:
        """The leader of FFN group ``index``."""
        return self.member(Role.FFN, index)

    @property
    def data(self) -> tuple[Mapping[str, str], ...]:
        """The opaque strings of the FFN group leaders, by group index."""
        return tuple(member.data for member in self.members if member.id.role is Role.FFN)

    def with_data(self, data: Sequence[Mapping[str, str]]) -> Membership:
        """The same membership with the groups' opaque strings replaced."""
        members = tuple(
            Member(m.id, m.process, m.address, m.heartbeat_address, dict(data[m.id.index]))
            if m.id.role is Role.FFN
            else m
            for m in self.members
        )
        return replace(self, members=members)


def expected_members(topology: Topology) -> tuple[MemberId, ...]:
    """Everybody who must take part in the rendezvous, attention lanes first, each by index."""
    lanes = tuple(MemberId(Role.ATTENTION, lane) for lane in range(topology.attention_dp))
    groups = tuple(MemberId(Role.FFN, group) for group in range(topology.ffn_members))
    return lanes + groups
