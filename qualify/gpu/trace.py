# SPDX-License-Identifier: Apache-2.0
"""Where the microseconds of a layer go: arithmetic on the kernels that a profiler saw in both roles.

Pure. A trace is what torch's profiler writes (Chrome's format, microseconds); both roles' traces of one run share the
host's clock. A step's kernels repeat layer by layer: on attention ``... push wait ...``, on the FFN ``wait ... push``.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PUSH, WAIT = "push_kernel", "wait_kernel"


@dataclass(frozen=True)
class Kernel:
    """One kernel (or copy) on the GPU; microseconds."""

    name: str
    start: float
    end: float
    stream: int = 0

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Layer:
    """One exchange as attention and the FFN saw it."""

    push: Kernel
    wait: Kernel
    ffn_wait: Kernel
    ffn_push: Kernel
    ffn_kernels: tuple[Kernel, ...]
    next_kernel: Kernel
    """The first kernel of attention after its wait."""

    before: Kernel
    """The last kernel of attention before its push."""


def kernels(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """The GPU's work in a trace, by start."""
    found = [
        Kernel(
            str(event["name"]),
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
            int(event.get("args", {}).get("stream", 0)),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def load(path: Path) -> list[Kernel]:
    """The kernels of a trace file, packed or not."""
    packed = path.read_bytes()
    text = gzip.decompress(packed) if path.suffix == ".gz" else packed
    return kernels(json.loads(text)["traceEvents"])


def layers(attention: Sequence[Kernel], ffn: Sequence[Kernel]) -> list[Layer]:
    """The exchanges that both traces hold whole, in order. Attention's n-th push belongs to the FFN's wait that ends
    first after it began.
    """
    ffn_waits = [index for index, kernel in enumerate(ffn) if WAIT in kernel.name]
    found: list[Layer] = []
    position = 0
    for index, kernel in enumerate(attention):
        if PUSH not in kernel.name or index == 0:
            continue
        wait = next(
            (later for later in range(index + 1, len(attention)) if WAIT in attention[later].name), None
        )
        if wait is None or wait + 1 >= len(attention):
            break
        while position < len(ffn_waits) and ffn[ffn_waits[position]].end <= kernel.start:
            position += 1
        if position == len(ffn_waits):
            break
        first = ffn_waits[position]
        answer = next((later for later in range(first + 1, len(ffn)) if PUSH in ffn[later].name), None)
        if answer is None:
            break
        found.append(
            Layer(
                kernel,
                attention[wait],
                ffn[first],
                ffn[answer],
                tuple(ffn[first + 1 : answer]),
                attention[wait + 1],
                attention[index - 1],
            )
        )
    return found


def breakdown(found: Sequence[Layer]) -> dict[str, dict[str, float]]:
    """Median and extremes in microseconds of each part of a layer, from attention's last kernel to its next.

    The parts follow each other: together they are `whole`. `ffn_gaps` are the pauses between the FFN's own kernels,
    within `ffn`.
    """
    rows: dict[str, list[float]] = {}
    for layer in found:
        own = layer.ffn_kernels
        busy = sum(kernel.duration for kernel in own)
        first = own[0].start if own else layer.ffn_push.start
        for name, value in {
            "launch_push": layer.push.start - layer.before.end,
            "request_seen": layer.ffn_wait.end - layer.push.start,
            "launch_ffn": first - layer.ffn_wait.end,
            "ffn": layer.ffn_push.start - first,
            "answer_seen": layer.wait.end - layer.ffn_push.start,
            "launch_next": layer.next_kernel.start - layer.wait.end,
            "ffn_kernels": float(len(own)),
            "ffn_busy": busy,
            "ffn_gaps": layer.ffn_push.start - first - busy,
            "whole": layer.next_kernel.start - layer.before.end,
        }.items():
            rows.setdefault(name, []).append(value)
    return {
        name: {
            "median": round(statistics.median(values), 2),
            "low": round(min(values), 2),
            "high": round(max(values), 2),
        }
        for name, values in rows.items()
    }


def by_name(found: Sequence[Layer]) -> dict[str, dict[str, float]]:
    """What the FFN's kernels between a wait and a push take, by name: how often per layer, and microseconds in all."""
    totals: dict[str, list[float]] = {}
    for layer in found:
        for kernel in layer.ffn_kernels:
            totals.setdefault(kernel.name[:80], []).append(kernel.duration)
    return {
        name: {
            "per_layer": round(len(values) / len(found), 2),
            "us_per_layer": round(sum(values) / len(found), 2),
        }
        for name, values in sorted(totals.items(), key=lambda item: -sum(item[1]))
    }


def excerpt(found: Iterable[Kernel], start: float, end: float) -> list[list[Any]]:
    """The kernels that began within a span, as rows of name, stream, start (from the span's) and duration."""
    return [
        [kernel.name[:100], kernel.stream, round(kernel.start - start, 2), round(kernel.duration, 2)]
        for kernel in found
        if start <= kernel.start <= end
    ]
