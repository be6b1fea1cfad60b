# SPDX-License-Identifier: Apache-2.0
"""How long a bare exchange takes: two processes, whole steps as CUDA graphs, one variant after the other.

Sizes are tokens x hidden of bfloat16. `round_trip_us` is one exchange both ways; `copy_us` is one copy of the same
bytes to where they go, alone in the same process: on one GPU a device copy, between two a copy to the peer.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EXCHANGES = 26
"""Per graph: the MoE layers of DeepSeek-V2-Lite."""

ONE_GPU = ((1, 2048), (32, 2048), (256, 2048), (1024, 2048), (1, 7168), (128, 7168), (1024, 7168))
TWO_GPUS = ((1, 7168), (16, 7168), (128, 7168), (1024, 7168), (8192, 7168))
START_S = 120.0
STEP_S = 60.0


@dataclass(frozen=True)
class Setup:
    """One run of the benchmark: which variant, where its ends live, which sizes, with which environment."""

    variant: str = "ipc-push"
    devices: tuple[str, str] = ("cuda:0", "cuda:0")
    """Of the FFN and of attention."""

    sizes: tuple[tuple[int, int], ...] = ONE_GPU
    repeats: int = 5
    replays: int = 10
    environment: Mapping[str, str] = field(default_factory=dict)


def measure(setup: Setup) -> list[dict[str, Any]]:
    """One row for each size; TimeoutError or EOFError when an end did not come through."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    before = {name: os.environ.get(name) for name in setup.environment}
    os.environ.update(setup.environment)
    try:
        processes = [
            context.Process(target=_end, args=(lane, theirs, setup), daemon=True)
            for lane, (_, theirs) in zip((None, 0), ends, strict=True)
        ]
        for process in processes:
            process.start()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
    for _, theirs in ends:
        theirs.close()
    ffn, attention = (ours for ours, _ in ends)
    try:
        return list(_conduct(ffn, attention, setup.sizes))
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _conduct(
    ffn: Connection, attention: Connection, sizes: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    for hidden in _widths(sizes):
        attention.send(_received(ffn, START_S))  # the offer
        for _ in _rows(sizes, hidden):
            for _ in range(3):  # warm, captured, measured
                _received(ffn, STEP_S), _received(attention, STEP_S)
                ffn.send(None)
                attention.send(None)
            row: dict[str, Any] = _received(attention, STEP_S)
            yield row


def _widths(sizes: Sequence[tuple[int, int]]) -> list[int]:
    return sorted({hidden for _, hidden in sizes})


def _rows(sizes: Sequence[tuple[int, int]], hidden: int) -> list[int]:
    return [tokens for tokens, width in sizes if width == hidden]


def _received(connection: Connection, timeout_s: float) -> Any:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"an end of the exchange benchmark said nothing for {timeout_s} s")
    return connection.recv()


def _end(lane: int | None, connection: Connection, setup: Setup) -> None:
    import torch

    from afd_plugin.config import LinkSettings
    from afd_plugin.connectors.base import ConnectorShape
    from afd_plugin.plan import Exchange, RemoteUnit, UnitKind
    from qualify.gpu.exchange_variants import VARIANTS

    own, other = setup.devices if lane is None else setup.devices[::-1]
    device = torch.device(own)
    torch.cuda.set_device(device)
    unit = RemoteUnit(0, "bench", UnitKind.EXPERTS)

    def meet() -> None:
        connection.send(None)
        connection.recv()

    for hidden in _widths(setup.sizes):
        rows = _rows(setup.sizes, hidden)
        shape = ConnectorShape(
            lanes=1, lane=lane, max_tokens=max(rows), hidden_size=hidden, dtype=torch.bfloat16, device=device,
            units=(unit,), router_dtypes=(None,) if lane == 0 else (),
        )  # fmt: skip
        plane = VARIANTS[setup.variant](shape, LinkSettings(token="bench"))  # noqa: S106
        if lane is None:
            connection.send(offer := plane.offer())
        else:
            offer = connection.recv()
        plane.connect(offer)
        stream = torch.cuda.Stream()
        for tokens in rows:
            source = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
            name = Exchange(0, 0, 0)

            def exchange() -> None:
                if lane is None:
                    states, _ = plane.recv_hidden(name, unit, [tokens])  # noqa: B023 - called in this turn
                    plane.send_output(name, [tokens], states)  # noqa: B023
                else:
                    plane.send_hidden(name, unit, source, None)  # noqa: B023
                    plane.recv_output(name, tokens)  # noqa: B023

            with torch.cuda.stream(stream):
                exchange()
            stream.synchronize()
            meet()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(EXCHANGES):
                    exchange()
            meet()
            graph.replay()
            torch.cuda.synchronize()
            trips = [_timed(graph.replay, setup.replays) for _ in range(setup.repeats)]
            plane.check()
            meet()
            if lane is not None:
                copy = _copy_seconds(source, torch.device(other), stream, setup)
                connection.send(row(tokens, hidden, trips, copy))
            del graph
        plane.close()


def row(tokens: int, hidden: int, trips: Sequence[float], copy: float) -> dict[str, Any]:
    """One size's figures from seconds per exchange (each repeat) and seconds per copy of the same bytes one way."""
    middle = statistics.median(trips)
    return {
        "tokens": tokens,
        "hidden": hidden,
        "bytes_each_way": tokens * hidden * 2,
        "round_trip_us": round(middle * 1e6, 2),
        "low_us": round(min(trips) * 1e6, 2),
        "high_us": round(max(trips) * 1e6, 2),
        "copy_us": round(copy * 1e6, 2),
        "share_of_copy_bandwidth": round(2 * copy / middle, 3),
    }


def _timed(replay: Callable[[], None], replays: int) -> float:
    """Seconds of one of the graph's exchanges."""
    import torch

    started = time.perf_counter()
    for _ in range(replays):
        replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / replays / EXCHANGES


def _copy_seconds(
    source: torch.Tensor, where: torch.device, stream: torch.cuda.Stream, setup: Setup
) -> float:
    """Seconds of one copy of ``source`` to ``where``, from a graph of as many copies as exchanges."""
    import torch

    target = torch.empty_like(source, device=where)
    with torch.cuda.stream(stream):
        target.copy_(source)
    torch.cuda.synchronize()
    if where == source.device:
        copies = torch.cuda.CUDAGraph()
        with torch.cuda.graph(copies, stream=stream):
            for _ in range(EXCHANGES):
                target.copy_(source)
        return min(_timed(copies.replay, setup.replays) for _ in range(setup.repeats))

    def without_graph() -> None:
        with torch.cuda.stream(stream):
            for _ in range(EXCHANGES):
                target.copy_(source, non_blocking=True)

    return min(_timed(without_graph, setup.replays) for _ in range(setup.repeats))


def transports(logs: Path, prefix: str) -> list[str]:
    """How NCCL says that it connects its ranks (`P2P/CUMEM`, `SHM/direct`, ...), from its debug files."""
    seen: set[str] = set()
    for path in logs.glob(f"{prefix}*"):
        seen.update(re.findall(r"Channel \d+(?:/\d+)? : .*? via (\S+)", path.read_text(errors="replace")))
    return sorted(seen)


def described(setup: Setup) -> dict[str, Any]:
    """A setup as evidence; names of folders are left out."""
    plain = asdict(setup)
    plain["environment"] = {
        name: value for name, value in setup.environment.items() if name != "NCCL_DEBUG_FILE"
    }
    return plain
