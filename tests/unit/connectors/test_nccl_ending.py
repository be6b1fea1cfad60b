# SPDX-License-Identifier: Apache-2.0
"""How NCCL's connector aborts its communicators, with communicators that only count: NCCL itself needs two GPUs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from afd_plugin.connectors.p2p_nccl import P2pNcclAFDConnector

pytestmark = pytest.mark.timeout(60)


class Communicator:
    def __init__(self) -> None:
        self.destroyed = 0
        self.may_end = threading.Event()

    def destroy(self) -> None:
        self.destroyed += 1
        self.may_end.wait(30)


def direction() -> Any:
    class Direction(SimpleNamespace):
        __hash__ = object.__hash__

    return Direction(communicator=Communicator())


@pytest.fixture
def connector() -> Any:
    made: Any = object.__new__(P2pNcclAFDConnector)
    made._seal = torch.zeros(1, dtype=torch.uint8)
    made._ending, made._aborts, made._aborted = threading.Lock(), {}, False
    made._requests = made._answers = None
    made._meeting = SimpleNamespace(close=lambda: None)
    return made


def test_an_abort_and_a_close_at_once_abort_each_communicator_once(connector: Any) -> None:
    ends = connector._requests, connector._answers = direction(), direction()
    with ThreadPoolExecutor(2) as pool:
        ending = [pool.submit(connector.abort), pool.submit(connector.close)]
        for end in ends:
            end.communicator.may_end.set()
        for each in ending:
            each.result(30)
    assert [end.communicator.destroyed for end in ends] == [1, 1]


def test_what_connect_made_after_an_abort_is_aborted_by_close(connector: Any) -> None:
    connector.abort()
    ends = connector._requests, connector._answers = direction(), direction()
    for end in ends:
        end.communicator.may_end.set()
    connector.close()
    assert [end.communicator.destroyed for end in ends] == [1, 1]
