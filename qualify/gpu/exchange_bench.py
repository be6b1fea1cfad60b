# SPDX-License-Identifier: Apache-2.0
"""How long a bare exchange takes: two processes, the product's own connector, whole steps as CUDA graphs."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

EXCHANGES = 26
"""Per graph: the MoE layers of DeepSeek-V2-Lite."""

REPLAYS = 30
SIZES = ((1, 2048), (32, 2048), (256, 2048), (1024, 2048), (1, 7168), (128, 7168), (1024, 7168))
START_S = 120.0
STEP_S = 60.0


def measure() -> list[dict[str, Any]]:
    """Microseconds per round trip by (tokens, hidden), and of a device copy of the same bytes in the same
    process.
    """
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=_end, args=(lane, theirs), daemon=True)
        for lane, (_, theirs) in zip((None, 0), ends, strict=True)
    ]
    for process in processes:
        process.start()
    ffn, attention = (ours for ours, _ in ends)
    results = []
    try:
        for hidden in sorted({hidden for _, hidden in SIZES}):
            offer = _received(ffn, START_S)
            attention.send(offer)
            for _ in [size for size in SIZES if size[1] == hidden]:
                for _ in range(3):  # warm, captured, measured
                    _received(ffn, STEP_S), _received(attention, STEP_S)
                    ffn.send(None)
                    attention.send(None)
                results.append(_received(attention, STEP_S))
        return results
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _received(connection: Connection, timeout_s: float) -> Any:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"an end of the exchange benchmark said nothing for {timeout_s} s")
    return connection.recv()


def _end(lane: int | None, connection: Connection) -> None:
    import torch

    from afd_plugin.config import LinkSettings
    from afd_plugin.connectors.base import AFDConnector, ConnectorShape
    from afd_plugin.connectors.registry import create_connector
    from afd_plugin.plan import Exchange, RemoteUnit, UnitKind

    torch.cuda.set_device(0)
    unit = RemoteUnit(0, "bench", UnitKind.EXPERTS)

    def meet() -> None:
        connection.send(None)
        connection.recv()

    for hidden in sorted({hidden for _, hidden in SIZES}):
        rows = [tokens for tokens, width in SIZES if width == hidden]
        shape = ConnectorShape(
            lanes=1, lane=lane, max_tokens=max(rows), hidden_size=hidden, dtype=torch.bfloat16,
            device=torch.device("cuda:0"), units=(unit,), router_dtypes=(None,) if lane == 0 else (),
        )  # fmt: skip
        plane = create_connector("CudaIpcAFDConnector", shape, LinkSettings(token="bench"))  # noqa: S106
        if lane is None:
            connection.send(offer := plane.offer())
        else:
            offer = connection.recv()
        plane.connect(offer)
        stream = torch.cuda.Stream()
        for tokens in rows:
            source = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)

            def exchange(
                tokens: int = tokens, source: torch.Tensor = source, plane: AFDConnector = plane
            ) -> None:
                name = Exchange(0, 0, 0)
                if lane is None:
                    states, _ = plane.recv_hidden(name, unit, [tokens])
                    plane.send_output(name, [tokens], states)
                else:
                    plane.send_hidden(name, unit, source, None)
                    plane.recv_output(name, tokens)

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
            started = time.perf_counter()
            for _ in range(REPLAYS):
                graph.replay()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - started) / REPLAYS / EXCHANGES
            plane.check()
            meet()
            if lane is None:
                continue
            target = torch.empty_like(source)
            copies = torch.cuda.CUDAGraph()
            with torch.cuda.graph(copies, stream=stream):
                for _ in range(EXCHANGES):
                    target.copy_(source)
            copies.replay()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(REPLAYS):
                copies.replay()
            torch.cuda.synchronize()
            copy_seconds = (time.perf_counter() - started) / REPLAYS / EXCHANGES
            connection.send(
                {
                    "tokens": tokens,
                    "hidden": hidden,
                    "round_trip_us": round(seconds * 1e6, 2),
                    "device_copy_us": round(copy_seconds * 1e6, 2),
                    "share_of_copy_bandwidth": round(2 * copy_seconds / seconds, 3),
                }
            )
        plane.close()
