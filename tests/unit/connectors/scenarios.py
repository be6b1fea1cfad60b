# SPDX-License-Identifier: Apache-2.0
"""What the ends of a data plane do in the contract suite. Every function runs in all processes of a team at
once.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import AFDConnector, ConnectorShape
from afd_plugin.connectors.registry import create_connector
from afd_plugin.errors import AFDError, ProtocolError
from afd_plugin.plan import Exchange, RemoteUnit, StepKind, StepPlan, UnitKind, schedule
from afd_plugin.topology import Topology
from tests.unit.connectors.team import End

HIDDEN = 64
MAX_TOKENS = 96
LOGITS = 8
UNITS = (
    RemoteUnit(0, "layers.0.mlp.experts", UnitKind.EXPERTS, LOGITS),
    RemoteUnit(1, "layers.1.mlp", UnitKind.DENSE),
    RemoteUnit(2, "layers.2.mlp.experts", UnitKind.EXPERTS),
)
SETTINGS = LinkSettings(token="contract", rendezvous_timeout_s=20, exchange_timeout_s=20)

Rows = Sequence[Sequence[int]]


def device() -> torch.device:
    return torch.device(os.environ.get("AFD_CONTRACT_DEVICE", "cpu"))


def make(
    end: End, connector: str, stages: int = 1, max_tokens: int = MAX_TOKENS, hidden: int = HIDDEN
) -> AFDConnector:
    if device().type == "cuda":
        torch.cuda.set_device(device())
    shape = ConnectorShape(
        lanes=end.lanes,
        lane=end.lane,
        max_tokens=max_tokens,
        hidden_size=hidden,
        dtype=torch.bfloat16,
        device=device(),
        units=UNITS,
        stages=stages,
        router_dtypes=(torch.float32, None, None) if end.lane is not None and device().type == "cuda" else (),
    )
    return create_connector(connector, shape, SETTINGS)


@contextmanager
def connected(end: End, connector: str, **sizes: Any) -> Iterator[AFDConnector]:
    made = make(end, connector, **sizes)
    try:
        made.connect(end.share(made.offer() if end.lane is None else None))
        yield made
    finally:
        made.close()


def drawn(
    lane: int, exchange: Exchange, rows: int, hidden: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that a lane sends in an exchange; every end can draw them."""
    seed = ((exchange.step * 31 + exchange.unit) * 31 + exchange.stage) * 31 + lane
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, hidden, generator=generator).to(torch.bfloat16)
    logits = torch.randn(rows, LOGITS, generator=generator)
    return states.to(device()), logits.to(device())


def computed(unit: RemoteUnit, states: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
    """What the FFN of these tests computes; exact in bfloat16's own arithmetic, row by row."""
    answer = states * 2 + unit.index
    return answer if logits is None else answer + logits.sum(-1, keepdim=True).to(states.dtype)


def plans(layouts: Sequence[Rows], first: int = 0) -> list[StepPlan]:
    return [
        StepPlan(first + i, StepKind.REAL, tuple(tuple(stages) for stages in rows))
        for i, rows in enumerate(layouts)
    ]


def run_step(end: End, plane: AFDConnector, plan: StepPlan) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One step at this end; on a lane the pairs (received, expected), copied."""
    pairs = []
    for exchange in schedule(plan, UNITS):
        unit = UNITS[exchange.unit]
        rows = [plan.tokens[lane][exchange.stage] for lane in range(end.lanes)]
        if end.lane is None:
            states, logits = plane.recv_hidden(exchange, unit, rows)
            plane.send_output(exchange, rows, computed(unit, states, logits))
        elif rows[end.lane]:
            states, logits = drawn(end.lane, exchange, rows[end.lane], plane.shape.hidden_size)
            plane.send_hidden(exchange, unit, states, logits if unit.router_logits else None)
            answer = plane.recv_output(exchange, rows[end.lane])
            pairs.append((answer.clone(), computed(unit, states, logits if unit.router_logits else None)))
    return pairs


# ------------------------------------------------------------------ scenarios


def round_trips(end: End, connector: str, layouts: Sequence[Rows], stages: int) -> dict[str, int]:
    """Every answer is exactly what this lane's own rows give, whatever the other lanes bring."""
    with connected(end, connector, stages=stages) as plane:
        wrong = 0
        for plan in plans(layouts):
            for received, expected in run_step(end, plane, plan):
                wrong += not torch.equal(received, expected)
        plane.check()
        counts = {
            "wrong": wrong,
            "sent": plane.counts.messages_sent,
            "received": plane.counts.messages_received,
            "eager": sum(plane.device_steps().eager),
            "replayed": sum(plane.device_steps().replayed),
        }
        end.meet("done")
        return counts


def many_steps(end: End, connector: str, group: int, groups: int, steps: int) -> dict[str, int]:
    """Random, unequal, sometimes zero rows for all lanes of ``groups`` groups; this team is one of the groups.

    Every lane compares every answer; the FFN compares every row that it receives.
    """
    topology = Topology(attention_dp=end.lanes * groups, ffn_dp=groups)
    lanes = topology.lanes_of(group)
    random = Random(steps)
    counts = dict.fromkeys(("wrong", "compared", "empty"), 0)
    with connected(end, connector) as plane:
        for step in range(steps):
            tokens = [(random.choice((0, 0, 1, 2, 7, 32, MAX_TOKENS)),) for _ in range(topology.attention_dp)]
            plan = StepPlan(step, StepKind.REAL, tuple(tokens))
            for exchange in schedule(plan, UNITS):
                unit, rows = UNITS[exchange.unit], plan.group_rows(lanes, 0)
                drew = [drawn(lane, exchange, count) for lane, count in zip(lanes, rows, strict=True)]
                wanted = unit.router_logits > 0
                if end.lane is None:
                    states, logits = plane.recv_hidden(exchange, unit, rows)
                    counts["wrong"] += not torch.equal(states, torch.cat([part for part, _ in drew]))
                    plane.send_output(exchange, rows, computed(unit, states, logits if sum(rows) else None))
                elif rows[end.lane]:
                    states, logits = drew[end.lane]
                    plane.send_hidden(exchange, unit, states, logits if wanted else None)
                    answer = plane.recv_output(exchange, rows[end.lane])
                    expected = computed(unit, states, logits if wanted else None)
                    counts["wrong"] += not torch.equal(answer, expected)
                counts["compared"] += end.lane is None or rows[end.lane] > 0
                counts["empty"] += 0 in rows if end.lane is None else rows[end.lane] == 0
        end.meet("done")
    return counts


def stale_message(end: End, connector: str) -> str:
    """A lane skips a unit; the FFN must take its message for an error, not for data. Returns what the FFN raised."""
    plan = plans([[[4]] * end.lanes])[0]
    first, second = list(schedule(plan, UNITS))[:2]
    with connected(end, connector) as plane:
        if end.lane is not None:
            if end.lane == 0:
                states, _ = drawn(end.lane, second, 4)
                plane.send_hidden(second, UNITS[1], states, None)
            end.meet("checked")
            return ""
        seen = ""
        try:
            # the sizes agree, so that only the name of the message can tell
            unit = RemoteUnit(0, UNITS[0].name, UnitKind.EXPERTS)
            plane.recv_hidden(first, unit, [4] + [0] * (end.lanes - 1))
            if plane.stream_ordered:
                torch.cuda.synchronize()
            plane.check()
        except ProtocolError as error:
            seen = str(error)
        end.meet("checked")
        return seen


def wrong_tensors(end: End, connector: str) -> list[str]:
    """Tensors that do not fit the handshake are refused where they enter; returns what was refused."""
    refused: list[str] = []
    with connected(end, connector) as plane:
        if end.lane is not None:
            good, logits = drawn(end.lane, Exchange(0, 0, 0), 4)
            for name, states, router in (
                ("width", good[:, :32].contiguous(), logits),
                ("dtype", good.float(), logits),
                ("no logits", good, None),
                ("logits width", good, logits[:, :4].contiguous()),
            ):
                try:
                    plane.send_hidden(Exchange(0, 0, 0), UNITS[0], states, router)
                except ProtocolError:
                    refused.append(name)
        else:
            for name, output in (
                ("rows", torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device=device())),
                ("dtype", torch.zeros(4 * end.lanes, HIDDEN, device=device())),
            ):
                try:
                    plane.send_output(Exchange(0, 0, 0), [4] * end.lanes, output)
                except ProtocolError:
                    refused.append(name)
        end.meet("done")
    return refused


def bounded_memory(end: End, connector: str, steps: int) -> tuple[int, int]:
    """Device bytes in use (resident bytes on the CPU) after a few steps, and after ``steps`` of distinct sizes."""
    with connected(end, connector) as plane:

        def run(count: int, first: int) -> int:
            for plan in plans(
                [[[1 + (i * 7 + lane) % MAX_TOKENS] for lane in range(end.lanes)] for i in range(count)],
                first,
            ):
                run_step(end, plane, plan)
            gc.collect()
            if plane.stream_ordered:
                torch.cuda.synchronize()
                return int(torch.cuda.memory_allocated())
            with open("/proc/self/statm", encoding="ascii") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        before = run(20, 0)
        end.meet("warm")
        after = run(steps, 20)
        end.meet("done")
        return before, after


def released_by_abort(end: End, connector: str) -> float:
    """The FFN waits for rows that never come; ``abort`` from another thread ends the wait. Returns the seconds."""
    with connected(end, connector) as plane:
        seconds = 0.0
        if end.lane is None:
            timer = threading.Timer(0.5, plane.abort)
            started = time.monotonic()
            timer.start()
            try:
                plane.recv_hidden(Exchange(0, 0, 0), UNITS[0], [4] * end.lanes)
                if plane.stream_ordered:
                    torch.cuda.synchronize()
                plane.check()
            except AFDError:
                seconds = time.monotonic() - started
            timer.join()
        end.meet("aborted")
        return seconds


def peer_dies(end: End, connector: str) -> tuple[str, float]:
    """A lane dies while the FFN waits for it, which ends the wait with PeerLost; returns the error and seconds."""
    with connected(end, connector) as plane:
        if end.lane == 0:
            time.sleep(0.3)  # lint: allow sleeping: the FFN is to be in its wait
            os._exit(9)
        if end.lane is not None:
            return "", 0.0
        started = time.monotonic()
        if plane.stream_ordered:
            # the control plane notices the death and aborts the data plane
            threading.Timer(1.0, plane.abort).start()
        try:
            plane.recv_hidden(Exchange(0, 0, 0), UNITS[0], [4] + [0] * (end.lanes - 1))
            if plane.stream_ordered:
                torch.cuda.synchronize()
            plane.check()
        except AFDError as error:
            return error.name, time.monotonic() - started
        return "nothing", time.monotonic() - started


def lives(end: End, connector: str, count: int) -> list[int]:
    """Connect, exchange and close ``count`` times. Returns free device bytes (0 on the CPU) after each life."""
    free = []
    for _ in range(count):
        with connected(end, connector) as plane:
            for plan in plans([[[5]] * end.lanes]):
                for received, expected in run_step(end, plane, plan):
                    assert torch.equal(received, expected)
            end.meet("served")
        end.meet("closed")
        if device().type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        end.meet("emptied")
        free.append(torch.cuda.mem_get_info()[0] if device().type == "cuda" else 0)
        end.meet("measured")
    return free
