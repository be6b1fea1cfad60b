# SPDX-License-Identifier: Apache-2.0
"""What an exchange costs on the CPU lane: native vLLM and AFD with either gate placement, interleaved.

All services run at once and idle ones cost no CPU, so a repeat alternates between them under the same conditions. Two
numbers are reported per exchange: the growth of the decode step against native, and the host time attention spent in
exchanges beyond what the FFN spent computing.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afd_plugin.config import GatePlacement
from afd_plugin.demo import checkpoints
from afd_plugin.demo.client import Endpoint
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.runner import child_environment
from afd_plugin.demo.service import Command, Service, afd_command, native_command

REPEATS = 7
TOKENS = 128
PROMPT = "A mixture of experts is"
NATIVE = "native"
LIMIT_MS = 0.4
"""Aim on a quiet machine of two cores: host time per exchange beyond the FFN's own compute."""


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements, in ms."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise at least one value."""
        ordered = sorted(values)
        return cls(round(statistics.median(ordered), 3), round(ordered[0], 3), round(ordered[-1], 3))


@dataclass(frozen=True)
class Quantiles:
    """Of single exchanges, in ms. The mean is what a step feels; the tail is other processes on the same cores."""

    median: float
    p90: float
    p99: float
    mean: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Summarise at least one value."""
        ordered = sorted(values)

        def at(share: float) -> float:
            return round(ordered[int(share * (len(ordered) - 1))], 3)

        return cls(at(0.5), at(0.9), at(0.99), round(statistics.fmean(ordered), 3), len(ordered))


@dataclass(frozen=True)
class ServiceCost:
    """What one service cost; all but the step is None for native vLLM, which exchanges nothing."""

    step_ms: Spread
    step_over_native: float | None = None
    growth_per_exchange_ms: float | None = None
    beyond_compute_per_exchange_ms: Quantiles | None = None
    messages_per_exchange: float | None = None


def run(model_name: str, repeats: int = REPEATS) -> dict[str, Any]:
    """Measure one checkpoint; returns plain values for the report. Takes about three minutes on two cores."""
    model = checkpoints.make(model_name)
    engine = EngineArguments()
    environment = child_environment()
    with tempfile.TemporaryDirectory(prefix="afd-bench-") as folder, ExitStack() as stack:
        services = {
            name: stack.enter_context(
                Service(command, model, model_name, engine, Path(folder) / name, environment)
            )
            for name, command in commands().items()
        }
        for service in services.values():
            service.await_ready()
        times = step_times({name: service.endpoint for name, service in services.items()}, repeats)
        for service in services.values():
            service.stop()
        costs = {name: cost(times[name], times[NATIVE], services[name].role_reports()) for name in services}
    return {
        "model": model_name,
        "repeats": repeats,
        "tokens": TOKENS,
        "limit_ms": LIMIT_MS,
        "services": {name: asdict(entry) for name, entry in costs.items()},
    }


def commands() -> dict[str, Command]:
    """Native vLLM and AFD with the gate on either side."""

    def with_gate(gate: GatePlacement) -> Command:
        def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
            words = afd_command(model, name, port, engine)
            position = words.index("serve") + 1
            return [*words[:position], "--gate", gate.value, *words[position:]]

        return command

    return {NATIVE: native_command, **{f"gate-on-{gate.value}": with_gate(gate) for gate in GatePlacement}}


def step_times(endpoints: Mapping[str, Endpoint], repeats: int) -> dict[str, list[float]]:
    """Milliseconds per decode step of each service, one value per repeat; the services take turns."""
    return interleave({name: lambda e=endpoint: _step_ms(e) for name, endpoint in endpoints.items()}, repeats)  # type: ignore[misc]


def interleave(measure: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call every measurement `repeats` times, in turns and in alternating order; a first turn is not counted."""
    found: dict[str, list[float]] = {name: [] for name in measure}
    for turn in range(repeats + 1):
        order = list(measure) if turn % 2 else list(measure)[::-1]
        for name in order:
            value = measure[name]()
            if turn:
                found[name].append(value)
    return found


def _step_ms(endpoint: Endpoint) -> float:
    """A decode step's time: the difference between a long answer and one of a single token."""
    _, prefill = endpoint.complete(PROMPT, max_tokens=1)
    _, whole = endpoint.complete(PROMPT, max_tokens=TOKENS)
    return 1000 * (whole - prefill) / (TOKENS - 1)


def cost(times: list[float], native: list[float], reports: Mapping[str, Mapping[str, Any]]) -> ServiceCost:
    """Combine step times with what the workers counted."""
    step = Spread.of(times)
    if not reports:
        return ServiceCost(step)
    attention, ffn = reports["attention-0-0"], reports["ffn-0-0"]
    native_step = Spread.of(native)
    exchanges = attention["exchanges"]
    # Both ends of a service that has stopped saw the same exchanges last.
    pairs = zip(attention["recent_exchange_s"], ffn["recent_compute_s"], strict=True)
    return ServiceCost(
        step_ms=step,
        step_over_native=round(step.median / native_step.median, 3),
        growth_per_exchange_ms=round((step.median - native_step.median) / attention["exchanges_per_step"], 3),
        beyond_compute_per_exchange_ms=Quantiles.of([1000 * (whole - compute) for whole, compute in pairs]),
        messages_per_exchange=attention["messages_sent"] / exchanges,
    )
