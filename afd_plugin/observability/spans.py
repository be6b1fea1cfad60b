# SPDX-License-Identifier: Apache-2.0
"""A span per step of the model, in both roles.

A step is one trace over both roles, which the first lane's span begins. Nothing travels for it: every process derives
the trace's id and that of the first span from the epoch and the step's number, so a sampler by ratio keeps or drops the
same steps everywhere. Steps do not join the traces of requests: a step serves many, and a request many steps.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.sdk.trace import Tracer
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TracerProvider,
    set_span_in_context,
    use_span,
)

SCOPE = "afd_plugin"

MEASURED = ("exchanges", "exchange_seconds", "wait_seconds", "compute_seconds")
"""The counters of a worker of which a span says how much its step added."""


def ids_of(epoch: int, step: int, owner: int = 0) -> tuple[int, int]:
    """Trace id (128 bits) of one step of one life of the service, and its first span's id (64 bits); neither is 0.

    ``owner`` is the lane where engines of their own count their steps each by itself, else 0.
    """
    digest = hashlib.blake2b(f"{epoch:x} {owner} {step}".encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:], "big") or 1


class _Ids(IdGenerator):
    """The ids of a trace that this process begins; of spans elsewhere in a trace, random ones.

    Not from ``random``: vLLM gives it the same seed in every worker, and would draw other numbers after us.
    """

    def __init__(self) -> None:
        self.given: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return self.given[0] if self.given else secrets.randbits(128) or 1

    def generate_span_id(self) -> int:
        return self.given[1] if self.given else secrets.randbits(64) or 1


class StepSpans:
    """Writes the spans of one worker's steps; used by the thread that runs them."""

    def __init__(self, tracer: Tracer, role: str, rank: str, *, first: bool) -> None:
        self._tracer = tracer
        self._first = first
        self._ids = _Ids()
        tracer.id_generator = self._ids
        self._name = f"afd {role} step"
        self._worker = {"afd.role": role, "afd.rank": rank}

    @classmethod
    def of(cls, provider: TracerProvider, role: str, rank: str, *, first: bool) -> StepSpans | None:
        """Spans to ``provider``'s exporter; None if it is not the SDK's, or switched off, and writes nothing.

        Args:
            role, rank: Who this worker is, as in metrics and events.
            first: Whether a step's trace begins with this worker's span.
        """
        tracer = provider.get_tracer(SCOPE)
        return cls(tracer, role, rank, first=first) if isinstance(tracer, Tracer) else None

    @contextmanager
    def step(
        self,
        epoch: int,
        step: int,
        owner: int,
        counts: object,
        attributes: Mapping[str, str | int | bool],
        *,
        resumed: bool = False,
    ) -> Iterator[None]:
        """The span of the enclosed step, with what it added to ``counts``; an error that leaves it is in the span.

        ``resumed`` says that the step began in an earlier life of the FFN: no span of this epoch begins its trace.
        """
        trace_id, span_id = ids_of(epoch, step, owner)
        begins = self._first or resumed
        self._ids.given = (trace_id, span_id) if begins else None
        context = Context() if begins else self._behind(trace_id, span_id)
        known = {**self._worker, "afd.epoch": f"{epoch:x}", "afd.step": step, **attributes}
        before = measured(counts)
        span = self._tracer.start_span(self._name, context, attributes=known)
        with use_span(span, end_on_exit=True):
            try:
                yield
            finally:
                for name, value in measured(counts).items():
                    span.set_attribute(f"afd.{name}", value - before[name])

    def _behind(self, trace_id: int, span_id: int) -> Context:
        """A place in the trace that another process begins, kept or dropped as the sampler there decides."""
        decision = self._tracer.sampler.should_sample(None, trace_id, self._name).decision
        flags = TraceFlags(
            TraceFlags.SAMPLED if decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT
        )
        first = SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
        return set_span_in_context(NonRecordingSpan(first), Context())


def measured(counts: object) -> dict[str, float]:
    """The present values of the counters in ``MEASURED`` that ``counts`` has."""
    return {name: value for name, value in vars(counts).items() if name in MEASURED}
