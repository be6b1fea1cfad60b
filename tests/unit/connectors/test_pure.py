# SPDX-License-Identifier: Apache-2.0
"""Parts of the CUDA connectors that need no GPU: layouts, names of messages, the meeting of the ends."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from vllm.distributed.utils import StatelessProcessGroup

from afd_plugin.config import LinkSettings, Role
from afd_plugin.connectors import exchange_ops as ops
from afd_plugin.connectors.arena_layout import ArenaLayout
from afd_plugin.connectors.base import ConnectorShape
from afd_plugin.connectors.meeting import Meeting
from afd_plugin.errors import ProtocolError, RendezvousTimeout
from afd_plugin.plan import RemoteUnit, UnitKind
from tests.unit.connectors import contract, device_scenarios, scenarios

SETTINGS = LinkSettings(token="of these tests", rendezvous_timeout_s=2)
SHAPE = ConnectorShape(
    lanes=3,
    lane=None,
    max_tokens=100,
    hidden_size=64,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
    units=(RemoteUnit(0, "experts", UnitKind.EXPERTS, 10),),
    stages=2,
)


def test_no_two_slots_or_words_of_an_arena_overlap() -> None:
    for role in (Role.FFN, Role.ATTENTION):
        layout = ArenaLayout.of(SHAPE, role)
        assert layout.peers == (3 if role is Role.FFN else 1)
        spans = []
        for stage in range(2):
            for peer in range(layout.peers):
                spans.append((layout.arrived(stage, peer), 8))
                spans.append((layout.hidden(stage, peer), 100 * 64 * 2))
                spans.append((layout.logits(stage, peer), 100 * 10 * 4 if role is Role.FFN else 0))
        spans.sort()
        assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= layout.size
        assert all(start % 256 == 0 for start, size in spans if size > 8)


def test_a_message_name_tells_units_and_row_counts_apart() -> None:
    names = {ops.tag(unit, rows) for unit in (0, 1, ops.MAX_UNITS - 1) for rows in (1, 2, ops.MAX_ROWS - 1)}
    assert len(names) == 9
    assert max(names) < 1 << 32
    word = ops.FAULT_MARK | ops.tag(7, 300) << 32 | 12
    assert ops.describe_fault(word) == "unit 7 with 300 rows, sequence number 12"
    for unit, rows in ((ops.MAX_UNITS, 1), (0, ops.MAX_ROWS), (0, 0)):
        with pytest.raises(ValueError, match="cannot be named"):
            ops.tag(unit, rows)


def _met(theirs: LinkSettings) -> tuple[Meeting, Meeting]:
    host, guest = Meeting(SETTINGS), Meeting(theirs)
    data = host.offer()
    thread = threading.Thread(target=host.join, args=(data, 2))
    thread.start()
    guest.join(data, 2)
    thread.join()
    return host, guest


def test_the_ends_of_a_data_plane_read_what_the_others_published() -> None:
    host, guest = _met(SETTINGS)
    host.publish("ffn", {"handle": "00"})
    guest.publish("lane 0", {"handle": "11", "router_dtypes": [None, "float32"]})
    assert guest.collect("ffn") == {"handle": "00"}
    assert host.collect("lane 0") == {"handle": "11", "router_dtypes": [None, "float32"]}
    guest.close()
    host.close()


def test_who_hosts_the_store_leaves_when_all_have_read_all() -> None:
    host, guest = _met(SETTINGS)
    names, seen = ["ffn", "lane 0"], []
    reader = threading.Thread(target=lambda: seen.append(host.gather("ffn", names, {"device": "a"})))
    reader.start()
    guest.publish("lane 0", {"device": "b"})
    reader.join(0.3)
    assert reader.is_alive(), "the host left before the guest had read"
    assert guest.gather("lane 0", names, {"device": "b"}) == [{"device": "a"}, {"device": "b"}]
    reader.join(5)
    assert seen == [[{"device": "a"}, {"device": "b"}]]
    guest.close()
    host.close()


def test_a_group_reads_what_a_holder_of_the_token_handed_round_and_nothing_else() -> None:
    host, guest = _met(SETTINGS)
    ends = [
        StatelessProcessGroup(rank, 2, store=end.sealed_store()) for rank, end in enumerate((host, guest))
    ]
    assert ends[0].broadcast_obj(b"id", src=0) == ends[1].broadcast_obj(None, src=0) == b"id"
    host._joined().set("broadcast_from/0/1", b"a stranger")
    with pytest.raises(ProtocolError, match="does not hold this service's token"):
        ends[1].broadcast_obj(None, src=0)
    guest.close()
    host.close()


def test_a_document_of_somebody_without_the_token_is_refused() -> None:
    host, stranger = _met(replace(SETTINGS, token="another"))
    stranger.publish("lane 0", {"handle": "66"})
    with pytest.raises(ProtocolError, match="does not hold this service's token"):
        host.collect("lane 0")
    stranger.close()
    host.close()


def test_an_end_that_does_not_come_is_named_within_the_bound() -> None:
    host, guest = _met(SETTINGS)
    with pytest.raises(RendezvousTimeout, match="lane 0 did not join"):
        host.collect("lane 0")
    guest.close()
    host.close()


def test_every_scenario_that_a_contract_test_names_exists() -> None:
    """Most run on a GPU host only, where a wrong name would cost a lease."""
    here = Path(contract.__file__)
    gpu = here.parents[2] / "gpu_e2e/test_contract.py"
    files = [here, gpu, *here.parent.glob("test_*.py")]
    named = {
        name for file in files for name in re.findall(r'\.run\(\s*"(\w+)"', file.read_text(encoding="utf-8"))
    }
    known = {**vars(scenarios), **vars(device_scenarios)}
    assert {"in_flight", "replays", "refused_on_one_gpu"} <= named
    assert sorted(name for name in named if not callable(known.get(name))) == []
