# SPDX-License-Identifier: Apache-2.0
"""Further scenarios of the contract suite (:mod:`tests.unit.connectors.scenarios`): of connectors that enqueue on a
CUDA stream.
"""

from __future__ import annotations

import time

import torch

from afd_plugin.errors import AFDError, PeerLost
from afd_plugin.plan import Exchange, schedule
from tests.unit.connectors.scenarios import (
    HIDDEN,
    UNITS,
    computed,
    connected,
    device,
    drawn,
    make,
    plans,
    run_step,
)
from tests.unit.connectors.team import End


def answers_after_abort(end: End, connector: str) -> str:
    """The FFN aborts while it waits for the first rows of a step whose answers are all enqueued behind the wait.

    Returns what became of them at this end: ``silent`` (none came), ``refused`` (they came, and the step was refused)
    or ``taken`` for data.
    """
    with connected(end, connector) as plane:
        rows = [4] * end.lanes
        exchanges = [Exchange(0, unit.index, 0) for unit in UNITS]
        if end.lane is None:
            for exchange, unit in zip(exchanges, UNITS, strict=True):
                plane.recv_hidden(exchange, unit, rows)
                plane.send_output(
                    exchange, rows, torch.zeros(sum(rows), HIDDEN, dtype=torch.bfloat16, device=device())
                )
            plane.abort()
            torch.cuda.synchronize()
            end.meet("aborted")
            return "silent"
        end.meet("aborted")
        for exchange in exchanges:
            plane.recv_output(exchange, 4)
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.5)  # lint: allow sleeping: what must not arrive gets time to arrive
        became = "silent"
        if done.query():
            try:
                plane.check()
                became = "taken"
            except PeerLost:
                became = "refused"
        plane.abort()
        torch.cuda.synchronize()
        return became


def replays(end: End, connector: str, rows: int, count: int, stages: int) -> dict[str, int]:
    """A captured step replays ``count`` times with new data each time, and mixes with eager steps."""
    plan = plans([[[rows] * stages] * end.lanes])[0]
    with connected(end, connector, stages=stages) as plane:
        stream = torch.cuda.Stream()
        sources: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        answers: dict[tuple[int, int], torch.Tensor] = {}
        for exchange in schedule(plan, UNITS):
            if end.lane is not None:
                key = (exchange.unit, exchange.stage)
                states, logits = drawn(end.lane, exchange, rows)
                sources[key] = (states, logits)
                answers[key] = torch.empty_like(states)

        def step() -> None:
            for exchange in schedule(plan, UNITS):
                unit = UNITS[exchange.unit]
                if end.lane is None:
                    states, logits = plane.recv_hidden(exchange, unit, [rows] * end.lanes)
                    plane.send_output(exchange, [rows] * end.lanes, computed(unit, states, logits))
                else:
                    states, logits = sources[exchange.unit, exchange.stage]
                    plane.send_hidden(exchange, unit, states, logits if unit.router_logits else None)
                    answers[exchange.unit, exchange.stage].copy_(plane.recv_output(exchange, rows))

        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        end.meet("warm")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        end.meet("captured")
        wrong = 0
        for number in range(count):
            for (unit_index, stage), (states, logits) in sources.items():
                fresh = drawn(end.lane or 0, Exchange(number + 1, unit_index, stage), rows)
                states.copy_(fresh[0])
                logits.copy_(fresh[1])
            # either side may run eagerly while the other replays
            lane_eager = number % 5 == 1
            ffn_eager = number % 5 == 2
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if (end.lane is None and ffn_eager) or (end.lane is not None and lane_eager):
                    step()
                else:
                    graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
            for (unit_index, _), (states, logits) in sources.items():
                unit = UNITS[unit_index]
                expected = computed(unit, states, logits if unit.router_logits else None)
                wrong += not torch.equal(answers[unit_index, _], expected)
        torch.cuda.synchronize()
        plane.check()
        steps = plane.device_steps()
        end.meet("done")
        return {"wrong": wrong, "eager": sum(steps.eager), "replayed": sum(steps.replayed)}


def in_flight(end: End, connector: str, rows: int, hidden: int, steps: int) -> dict[str, int]:
    """Lanes send the rows of both stages before they take the first answer, unit by unit; every answer is compared."""
    wrong = 0
    with connected(end, connector, stages=2, max_tokens=rows, hidden=hidden) as plane:
        for plan in plans([[[rows] * 2] * end.lanes] * steps):
            if end.lane is None:
                run_step(end, plane, plan)
                continue
            for unit in UNITS:
                sent = []
                for stage in range(2):
                    exchange = Exchange(plan.step, unit.index, stage)
                    states, logits = drawn(end.lane, exchange, rows, hidden)
                    wanted = logits if unit.router_logits else None
                    plane.send_hidden(exchange, unit, states, wanted)
                    sent.append((exchange, computed(unit, states, wanted)))
                for exchange, expected in sent:
                    wrong += not torch.equal(plane.recv_output(exchange, rows), expected)
        plane.check()
        end.meet("done")
    return {"wrong": wrong}


def refused_on_one_gpu(end: End, connector: str) -> str:
    """NCCL's connector refuses ends that share a GPU; returns the sentence."""
    plane = make(end, connector)
    try:
        plane.connect(end.share(plane.offer() if end.lane is None else None))
    except AFDError as error:
        return str(error)
    finally:
        plane.close()
    return "nothing was refused"
