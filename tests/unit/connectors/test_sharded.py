# SPDX-License-Identifier: Apache-2.0
"""Attention's end of several shards: real links over loopback, two FFN processes as threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import AFDConnector, ConnectorShape
from afd_plugin.connectors.registry import create_connector
from afd_plugin.connectors.sharded import ShardedConnector, add, of_shard
from afd_plugin.errors import ConfigRefused, ProtocolError
from afd_plugin.plan import Exchange, RemoteUnit, UnitKind

UNIT = RemoteUnit(0, "experts", UnitKind.EXPERTS)
HIDDEN = 16
SETTINGS = LinkSettings(token="shards", rendezvous_timeout_s=20, exchange_timeout_s=20)
SHAPE = ConnectorShape(
    lanes=1,
    lane=0,
    max_tokens=8,
    hidden_size=HIDDEN,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
    units=(UNIT,),
)


def test_more_shards_than_a_gpu_adds_in_one_kernel_are_refused_before_anything_is_made() -> None:
    def never(shape: ConnectorShape, settings: LinkSettings) -> AFDConnector:
        raise AssertionError("a link was made")

    with pytest.raises(ConfigRefused, match="split over 9 FFN processes"):
        ShardedConnector(never, replace(SHAPE, device=torch.device("cuda")), SETTINGS, 9)


def serve(plane: AFDConnector, offer: dict[str, str], answer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    plane.connect(offer)
    for step, rows in enumerate((3, 8)):
        exchange = Exchange(step, 0, 0)
        states, _ = plane.recv_hidden(exchange, UNIT, [rows])
        plane.send_output(exchange, [rows], answer(states))


def test_every_shard_gets_the_rows_and_their_answers_are_added() -> None:
    make = partial(create_connector, "TcpAFDConnector")
    shards = [make(replace(SHAPE, lane=None), SETTINGS) for _ in range(2)]
    offers = [shard.offer() for shard in shards]
    lane = ShardedConnector(make, SHAPE, SETTINGS, 2)
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(serve, shard, offer, lambda rows, factor=factor: rows * factor)
            for shard, offer, factor in zip(shards, offers, (2, 0.5), strict=True)
        ]
        lane.connect(of_shard(0, offers[0]) | of_shard(1, offers[1]))
        for step, rows in enumerate((3, 8)):
            states = torch.full((rows, HIDDEN), step + 1.0, dtype=torch.bfloat16)
            lane.send_hidden(Exchange(step, 0, 0), UNIT, states, None)
            assert torch.equal(lane.recv_output(Exchange(step, 0, 0), rows), states * 2.5)
        for one in running:
            one.result(20)
    lane.check()
    assert (lane.counts.messages_sent, lane.counts.messages_received) == (4, 4)
    for plane in (lane, *shards):
        plane.close()


def test_the_sum_is_rounded_once() -> None:
    parts = [torch.full((1, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    add(parts, out)
    assert out.item() == 258.0  # rounded after each addition it would stay at 256


def test_a_shard_has_no_shards_of_its_own() -> None:
    with pytest.raises(ProtocolError, match="one link to each lane"):
        ShardedConnector(partial(create_connector, "TcpAFDConnector"), replace(SHAPE, lane=None), SETTINGS, 2)
