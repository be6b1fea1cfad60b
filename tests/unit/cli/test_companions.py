# SPDX-License-Identifier: Apache-2.0
"""The workers of one world end together when one dies, and each by itself when all are well."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from afd_plugin.cli.companions import Companions

CONTEXT = multiprocessing.get_context("spawn")
GRACE_S = 0.3
LIFE_S = 60.0


def stuck(pipe: Connection) -> None:
    """As in a collective: deaf to SIGTERM, and it ends well when it may."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send("started")
    pipe.poll(LIFE_S)


class World:
    """Processes, each with a pipe that lets it go."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def start(self, size: int) -> list[BaseProcess]:
        for _ in range(size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=stuck, args=(theirs,))
            process.start()
            theirs.close()
            assert ours.poll(LIFE_S)
            self.processes.append(process)
            self._pipes.append(ours)
        return self.processes

    def let_go(self) -> None:
        """Each ends in good order; waits for it."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for process in made.processes:
        process.kill()
        process.join(10)


def test_the_others_of_a_world_end_soon_after_one_was_killed(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    processes = world.start(3)
    companions = Companions(processes, GRACE_S)
    began = time.monotonic()
    processes[1].kill()
    for process in processes:
        process.join(10)
    assert GRACE_S <= time.monotonic() - began < 5
    companions.close()
    assert {process.exitcode for process in processes} == {-signal.SIGKILL}
    assert f"{processes[1].name} died; ending {processes[0].name}" in capfd.readouterr().err


def test_a_world_that_ends_in_good_order_is_left_to_it(world: World) -> None:
    processes = world.start(2)
    companions = Companions(processes, GRACE_S)
    world.let_go()
    companions.close()
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.parametrize("size", [1, 2])
def test_nobody_is_ended_once_all_were_asked_to_end_or_where_there_is_nobody_else(
    size: int, world: World
) -> None:
    processes = world.start(size)
    companions = Companions(processes, GRACE_S)
    companions.let_end()
    processes[0].kill()
    processes[0].join(10)
    companions.close()
    world.let_go()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0][:size]


def test_closing_ends_the_thread_and_no_process(world: World) -> None:
    processes = world.start(2)
    companions = Companions(processes, GRACE_S)
    thread = companions._thread
    assert thread is not None
    companions.close()
    companions.close()
    assert not thread.is_alive()
    assert all(process.is_alive() for process in processes)
