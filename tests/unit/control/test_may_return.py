# SPDX-License-Identifier: Apache-2.0
"""Which losses may be mended: an FFN's own fault, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from afd_plugin.config import Role
from afd_plugin.control import AttentionControl
from afd_plugin.control import messages as m
from afd_plugin.control.monitor import _failure_of
from afd_plugin.errors import AskedToEnd, PeerAborted, PeerLost, PeerShutDown, ProtocolError
from afd_plugin.topology import Topology
from tests.unit.control.harness import FAST, PATIENCE_S, Party, failure_of, fingerprint, meeting, serving

TWO_LANES = Topology(attention_dp=2)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("out of memory"), True),
        ("planted", True),
        (AskedToEnd("it was asked to end (SIGTERM) while its peers still needed it"), False),
        (ProtocolError("rows"), False),
    ],
    ids=["fault", "no-name", "sigterm", "protocol"],
)
def test_an_ffn_that_failed_may_return_unless_it_was_asked_to_end_or_the_protocol_broke(
    error: Exception | str, expected: bool
) -> None:
    with serving(TWO_LANES) as service:
        service.groups[0].control.abort(error)
        for lane in service.lanes:
            seen = failure_of(lane)
            assert isinstance(seen, PeerAborted)
            assert seen.may_return is expected


def test_a_farewell_of_the_ffn_is_no_loss_to_be_mended() -> None:
    with serving() as service:
        service.groups[0].close()
        seen = failure_of(service.lanes[0])
        assert isinstance(seen, PeerShutDown)
        assert not seen.may_return
        service.groups.clear()


def test_the_loss_of_another_lane_is_not_mended_by_an_ffn() -> None:
    with serving(TWO_LANES) as service:
        service.lanes[1].control.abort("planted")
        seen = failure_of(service.lanes[0])
        assert isinstance(seen, PeerAborted)
        assert not seen.may_return
    relayed = m.Abort(1, m.MemberId(Role.FFN, 0), "peer-lost", "attention lane 1 is gone")
    found = _failure_of(relayed, "FFN group 0")
    assert isinstance(found, PeerLost)
    assert not found.may_return


def test_what_a_lane_says_when_it_comes_again_reaches_every_member() -> None:
    with serving(TWO_LANES) as service:
        assert all(member.data == {} for member in service.lanes[0].control.membership.members[:2])
    with meeting(TWO_LANES) as service:
        waiting = [service.start_group(0)]
        for lane in range(2):
            party = Party(AttentionControl())
            service.lanes.append(party)
            settings = replace(FAST, peer=service.peer)
            data = {"completed": str(7 + lane)}
            waiting.append(party.start("connect", settings, TWO_LANES, lane, fingerprint(), data))
        directories = [one.result(PATIENCE_S).members for one in waiting]
        service.ready()
        for directory in (*directories, service.lanes[0].control.membership.members):
            assert [member.data for member in directory[:2]] == [{"completed": "7"}, {"completed": "8"}]
