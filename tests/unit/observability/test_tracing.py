# SPDX-License-Identifier: Apache-2.0
"""Spans of one step meet in one trace, whoever writes them, and name the role and rank they come from."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from afd_plugin.observability.spans import StepSpans, ids_of
from afd_plugin.observability.tracing import identify, step_spans

EPOCH = 0x5D0F43C2


@dataclass
class Counts:
    exchanges: int = 10
    exchange_seconds: float = 1.0
    tokens: int = 3


class Process:
    """One traced process: its own provider, what it exported, and its step spans."""

    def __init__(self, role: str, rank: str, *, first: bool, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        spans = StepSpans.of(self.provider, role, rank, first=first)
        assert spans is not None
        self.spans = spans

    def run(self, step: int, owner: int = 0, resumed: bool = False) -> None:
        with self.spans.step(EPOCH, step, owner, Counts(), {}, resumed=resumed):
            pass

    @property
    def finished(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    @property
    def only(self) -> ReadableSpan:
        (span,) = self.finished
        return span


def test_a_span_says_who_ran_which_step_and_what_it_added_to_the_counters() -> None:
    process = Process("attention", "0-0", first=True)
    counts = Counts()
    with process.spans.step(EPOCH, 12, 0, counts, {"afd.kind": "real", "afd.tokens": 7}):
        counts.exchanges += 4
        counts.exchange_seconds += 0.25
    assert process.only.name == "afd attention step"
    assert dict(process.only.attributes or {}) == {
        "afd.role": "attention",
        "afd.rank": "0-0",
        "afd.epoch": "5d0f43c2",
        "afd.step": 12,
        "afd.kind": "real",
        "afd.tokens": 7,
        "afd.exchanges": 4,
        "afd.exchange_seconds": 0.25,
    }


def test_both_roles_and_all_lanes_write_one_trace_that_the_first_lane_begins() -> None:
    first = Process("attention", "0-0", first=True)
    others = [Process("attention", "1-0", first=False), Process("ffn", "0-0", first=False)]
    for process in (*others, first):
        process.run(12)
    root = first.only
    assert root.parent is None
    assert root.context is not None
    assert (root.context.trace_id, root.context.span_id) == ids_of(EPOCH, 12)
    for process in others:
        assert process.only.parent is not None
        assert process.only.context is not None
        assert process.only.parent.span_id == root.context.span_id
        assert process.only.context.trace_id == root.context.trace_id
    spans = [process.only.context.span_id for process in (first, *others) if process.only.context is not None]
    assert len(set(spans)) == 3


def test_spans_of_processes_with_the_same_seed_differ_and_leave_the_seeded_numbers_alone() -> None:
    drawn, spans = [], set()
    for rank in ("1-0", "2-0"):
        process = Process("attention", rank, first=False)
        random.seed(0)
        process.run(12)
        drawn.append(random.random())
        assert process.only.context is not None
        spans.add(process.only.context.span_id)
    random.seed(0)
    assert drawn == [random.random()] * 2
    assert len(spans) == 2


def test_other_steps_lives_and_engines_have_other_traces() -> None:
    keys = [(EPOCH, 1, 0), (EPOCH, 2, 0), (EPOCH + 1, 1, 0), (EPOCH, 1, 1), (EPOCH, 11, 0)]
    assert len({ids_of(*key) for key in keys}) == len(keys)


def test_a_step_that_goes_on_after_a_restart_begins_a_trace_because_no_span_of_its_epoch_does() -> None:
    ffn = Process("ffn", "0-0", first=False)
    ffn.run(12, resumed=True)
    ffn.run(13)
    again, next_one = ffn.finished
    assert again.parent is None
    assert next_one.parent is not None
    assert next_one.context is not None
    assert again.context is not None
    assert again.context.span_id != next_one.context.span_id


@pytest.mark.parametrize("wrapped", [True, False], ids=["parent based", "by trace id alone"])
def test_a_sampler_by_ratio_keeps_the_same_steps_in_both_roles(wrapped: bool) -> None:
    ratio = TraceIdRatioBased(0.5)
    sampler = ParentBased(ratio) if wrapped else ratio
    attention = Process("attention", "0-0", first=True, sampler=sampler)
    ffn = Process("ffn", "0-0", first=False, sampler=sampler)
    for step in range(64):
        attention.run(step)
        ffn.run(step)
    kept = [
        [(span.attributes or {})["afd.step"] for span in process.finished] for process in (attention, ffn)
    ]
    assert kept[0] == kept[1]
    assert 16 < len(kept[0]) < 48


def test_an_error_that_ends_a_step_is_in_its_span_and_goes_on() -> None:
    process = Process("ffn", "0-0", first=False)
    with (
        pytest.raises(ValueError, match="no such expert"),
        process.spans.step(EPOCH, 3, 0, Counts(), {}),
    ):
        raise ValueError("no such expert")
    assert process.only.status.status_code is StatusCode.ERROR
    assert [item.name for item in process.only.events] == ["exception"]


def test_a_step_does_not_join_the_trace_of_the_start_in_which_it_runs() -> None:
    process = Process("attention", "0-0", first=True)
    with process.provider.get_tracer("vllm").start_as_current_span("Warmup (CPU)"):
        process.run(0)
    step = next(span for span in process.finished if span.name == "afd attention step")
    assert step.parent is None


def test_ids_of_other_tracers_of_the_process_stay_their_own() -> None:
    process = Process("attention", "0-0", first=True)
    process.run(5)
    process.provider.get_tracer("vllm").start_span("llm_request").end()
    step, request = process.finished
    assert step.context is not None
    assert request.context is not None
    assert step.context.trace_id != request.context.trace_id


def test_nothing_is_written_without_an_endpoint_or_without_an_exporter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert step_spans("ffn", "0-0", first=False) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    assert step_spans("ffn", "0-0", first=False) is None  # the process's provider is not the SDK's
    assert StepSpans.of(NoOpTracerProvider(), "ffn", "0-0", first=False) is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert StepSpans.of(TracerProvider(), "ffn", "0-0", first=False) is None


@pytest.mark.parametrize(
    ("given", "service", "instance"),
    [
        ({}, "afd-ffn", "ffn-1"),
        ({"OTEL_SERVICE_NAME": "chat"}, "chat", "ffn-1"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=chat,zone=a"}, "chat", "ffn-1"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=pod-7"}, "afd-ffn", "pod-7"),
    ],
)
def test_a_process_is_named_after_its_role_unless_the_user_has_named_it(
    given: dict[str, str], service: str, instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = dict(given)
    identify(environ, "ffn", "1")
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    attributes = Resource.create({}).attributes
    assert attributes["service.name"] == service
    assert attributes["service.instance.id"] == instance
    assert attributes["afd.role"] == "ffn"
    assert attributes.get("zone") == ("a" if "zone=a" in given.get("OTEL_RESOURCE_ATTRIBUTES", "") else None)
