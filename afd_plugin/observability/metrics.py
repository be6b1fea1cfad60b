# SPDX-License-Identifier: Apache-2.0
"""AFD's Prometheus metrics: what exists, and a thread that publishes a worker's counters.

Workers are several processes below the one that answers HTTP, so metrics travel as files in the directory of
prometheus_client's multiprocess mode (``PROMETHEUS_MULTIPROC_DIR``), which the launcher makes for each start
and removes with it. vLLM's own ``/metrics`` collects the attention workers' files from there; the FFN's status
endpoint (:mod:`afd_plugin.observability.status`) collects the FFN workers'. Without the variable nothing is
published. The step path is not touched: a thread reads plain counters once a second.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own: where the processes of one service leave their metrics."""

INTERVAL_S = 1.0


@dataclass(frozen=True)
class Measure:
    """One metric: its name without the ``_total`` of counters, what it says, and the labels beside role and rank."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    gauge: bool = False


MEASURES: tuple[Measure, ...] = (
    Measure("afd:steps", "Forward passes, by kind: real, dummy, capture.", ("kind",)),
    Measure("afd:graph_steps", "Forward passes that replayed a captured graph."),
    Measure("afd:microbatched_steps", "Forward passes in two stages."),
    Measure("afd:tokens", "Rows of hidden states that passed, padding included."),
    Measure("afd:exchanges", "Calls of a remote unit."),
    Measure("afd:exchange_seconds", "Attention: host seconds inside exchanges, waiting included."),
    Measure("afd:wait_seconds", "Attention: host seconds of these spent waiting for the FFN's answer."),
    Measure(
        "afd:announce_seconds",
        "Attention: host seconds before each forward pass for checks and its announcement.",
    ),
    Measure("afd:compute_seconds", "FFN: host seconds inside remote units."),
    Measure("afd:bytes", "Payload bytes on the data plane.", ("direction",)),
    Measure("afd:messages", "Messages on the data plane.", ("direction",)),
    Measure("afd:reconnects", "Times this worker met its peers again after one of them was started anew."),
    Measure("afd:control_dropped", "Control messages that were dropped, by reason.", ("reason",)),
    Measure("afd:control_strangers", "Connections to the control port without the token."),
    Measure("afd:control_refused", "Processes that knocked and were refused, by error.", ("error",)),
    Measure("afd:peer_up", "1 while the neighbour is well, 0 once it is lost.", ("peer",), gauge=True),
    Measure("afd:peer_seen_seconds", "Seconds since the neighbour was last heard.", ("peer",), gauge=True),
)
"""Every metric of ours; the dashboard and the documentation name only these."""

_BY_NAME = {measure.name: measure for measure in MEASURES}


@dataclass(frozen=True)
class Reading:
    """The present value of one metric; counters are given as their total since the worker's start."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


def readings_of(counts: Mapping[str, object]) -> Iterable[Reading]:
    """Readings from a worker's plain counters (the ``afd_status`` names); unknown names are left out."""
    plain = {
        "graph_steps": "afd:graph_steps",
        "microbatched_steps": "afd:microbatched_steps",
        "tokens": "afd:tokens",
        "exchanges": "afd:exchanges",
        "exchange_seconds": "afd:exchange_seconds",
        "wait_seconds": "afd:wait_seconds",
        "announce_seconds": "afd:announce_seconds",
        "compute_seconds": "afd:compute_seconds",
        "reconnects": "afd:reconnects",
        "strangers": "afd:control_strangers",
    }
    labelled = {"steps": "afd:steps", "dropped": "afd:control_dropped", "refused": "afd:control_refused"}
    for key, value in counts.items():
        if key in plain and isinstance(value, int | float):
            yield Reading(plain[key], float(value))
        elif key in labelled and isinstance(value, Mapping):
            for label, amount in value.items():
                yield Reading(labelled[key], float(amount), (str(label),))
        elif key in ("bytes_sent", "bytes_received", "messages_sent", "messages_received"):
            kind, _, direction = key.partition("_")
            if isinstance(value, int | float):
                yield Reading(f"afd:{kind}", float(value), (direction,))


class Publisher:
    """Publishes a worker's readings every second until :meth:`stop`; does nothing without a metrics directory.

    Args:
        role: ``attention`` or ``ffn``.
        rank: Which worker of the role, for example ``0-0`` (data-parallel and tensor-parallel rank).
        read: Returns the present readings; called from the publisher's thread.
    """

    def __init__(self, role: str, rank: str, read: Callable[[], Iterable[Reading]]) -> None:
        self._identity = (role, rank)
        self._read = read
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}
        self._metrics: dict[str, Counter | Gauge] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if os.environ.get(DIRECTORY_VARIABLE):
            self._metrics = _metrics()
            self._thread = threading.Thread(target=self._run, name="afd-metrics", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self.publish()

    def publish(self) -> None:
        """Publish the readings of this moment."""
        for reading in self._read():
            key = (reading.name, reading.labels)
            metric = self._metrics[reading.name].labels(*self._identity, *reading.labels)
            if _BY_NAME[reading.name].gauge:
                metric.set(reading.value)  # type: ignore[union-attr]
            elif reading.value > self._seen.get(key, 0.0):
                metric.inc(reading.value - self._seen.get(key, 0.0))
                self._seen[key] = reading.value

    def stop(self) -> None:
        """Publish once more and end the thread; idempotent."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join(5.0)
        self._thread = None
        self.publish()


_REGISTERED: dict[str, Counter | Gauge] = {}


def _metrics() -> dict[str, Counter | Gauge]:
    """One metric per measure and process; the registry is of no use beyond the files."""
    from prometheus_client import CollectorRegistry, Counter, Gauge

    if not _REGISTERED:
        registry = CollectorRegistry()
        for measure in MEASURES:
            labels = ("role", "rank", *measure.labels)
            if measure.gauge:
                _REGISTERED[measure.name] = Gauge(
                    measure.name, measure.text, labels, registry=registry, multiprocess_mode="mostrecent"
                )
            else:
                _REGISTERED[measure.name] = Counter(measure.name, measure.text, labels, registry=registry)
    return _REGISTERED


def collected() -> CollectorRegistry:
    """A registry that collects what all processes of this service have published; empty without a directory."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    if os.environ.get(DIRECTORY_VARIABLE):
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
