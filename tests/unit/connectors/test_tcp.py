# SPDX-License-Identifier: Apache-2.0
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import ConnectorShape
from afd_plugin.connectors.tcp import TcpAFDConnector
from afd_plugin.errors import RendezvousTimeout
from tests.unit.connectors.contract import ContractSuite
from tests.unit.connectors.scenarios import UNITS
from tests.unit.connectors.team import START_S, Team
from tests.unit.connectors.test_gloo import ENVIRONMENT

pytestmark = pytest.mark.timeout(START_S + 60)  # whichever test comes first waits for vLLM's import


class TestTcp(ContractSuite):
    connector = "TcpAFDConnector"
    environment = ENVIRONMENT

    def test_abort_releases_a_wait(self, team: Team) -> None:
        seconds, *_ = team.run("released_by_abort", connector=self.connector)
        # By the abort half a second after its begin, not by the bound of 20 s on an exchange.
        assert 0.4 < seconds < 10


def ends(lanes: int, settings: LinkSettings) -> list[TcpAFDConnector]:
    """The FFN's end and every lane's, in this process."""
    return [
        TcpAFDConnector(
            ConnectorShape(lanes, lane, 4, 8, torch.bfloat16, torch.device("cpu"), UNITS), settings
        )
        for lane in (None, *range(lanes))
    ]


def test_strangers_on_the_data_port_do_not_keep_the_lanes_out() -> None:
    ffn, *lanes = ends(2, LinkSettings(token="t", rendezvous_timeout_s=20))
    data = ffn.offer()
    host, port = data["tcp"].split()
    strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
    strangers[2].close()
    with ThreadPoolExecutor(3) as pool:
        joined = [pool.submit(end.connect, data) for end in (ffn, *lanes)]
        assert [future.exception() for future in joined] == [None] * 3
    for end in (*strangers, ffn, *lanes):
        end.close()


def test_a_lane_that_never_comes_is_named_and_nothing_listens_afterwards() -> None:
    ffn, first, _ = ends(2, LinkSettings(token="t", rendezvous_timeout_s=3.0))
    data = ffn.offer()
    with ThreadPoolExecutor(2) as pool:
        accepting, calling = pool.submit(ffn.connect, data), pool.submit(first.connect, data)
        with pytest.raises(RendezvousTimeout, match=r"lanes \[1\] did not join"):
            accepting.result()
        calling.result()
    ffn.close()
    with pytest.raises(RendezvousTimeout, match="cannot be reached"):
        first.connect(data)
    first.close()


def test_callers_who_are_not_wanted_do_not_extend_the_wait_for_a_lane() -> None:
    (ffn, _) = ends(1, LinkSettings(token="t", rendezvous_timeout_s=1.0))
    host, port = ffn.offer()["tcp"].split()
    over = threading.Event()

    def call() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)

    caller = threading.Thread(target=call)
    caller.start()
    began = time.monotonic()
    try:
        with pytest.raises(RendezvousTimeout, match=r"lanes \[0\] did not join"):
            ffn.connect({})
        assert time.monotonic() - began < 10
    finally:
        over.set()
        caller.join(10)
        ffn.close()


@pytest.fixture
def two_groups() -> Iterator[list[Team]]:
    """The processes of 4A2F: two FFN groups with two lanes each."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Team(2, ENVIRONMENT))) for _ in range(2)]


def test_a_thousand_unequal_and_empty_steps_through_six_processes_arrive_to_the_bit(
    two_groups: list[Team],
) -> None:
    steps = 1000
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(
                team.run, "many_steps", connector="TcpAFDConnector", group=group, groups=2, steps=steps
            )
            for group, team in enumerate(two_groups)
        ]
        ends = [end for future in running for end in future.result()]
    assert [end["wrong"] for end in ends] == [0] * 6
    assert all(end["empty"] > steps / 10 for end in ends)
    exchanges = steps * len(UNITS)
    assert [end["compared"] for end in ends[::3]] == [exchanges] * 2
    for end in (*ends[1:3], *ends[4:]):
        assert end["compared"] + end["empty"] == exchanges
