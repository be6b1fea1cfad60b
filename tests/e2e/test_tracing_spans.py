# SPDX-License-Identifier: Apache-2.0
"""A traced service: vLLM's spans of requests and of the start come from both roles, and every step is one trace."""

import http.client
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from afd_plugin.demo.client import Endpoint
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.prompts import PROMPTS
from afd_plugin.demo.service import Command
from afd_plugin.supervisor.ports import PortReservation
from tests.e2e.collector import Span, collecting
from tests.e2e.services import afd_serve, running, together

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.full]

OVER_HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
LAYERS = 4
CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
"""Trace and span of a client that sends its context along."""


def traced(command: Command, endpoint: str) -> Command:
    """`command` with vLLM's option for an exporter."""

    def words(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        return [*command(model, name, port, engine), "--otlp-traces-endpoint", endpoint]

    return words


def ask(endpoint: Endpoint, headers: dict[str, str]) -> None:
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=60)
    body = json.dumps({"model": endpoint.model, "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        assert answer.status == http.client.OK, answer.read()
    finally:
        connection.close()


def names(spans: Sequence[Span], role: str) -> set[str]:
    return {span.name for span in spans if span.role == role}


def steps(spans: Sequence[Span], role: str, rank: str = "0-0") -> dict[tuple[object, object], Span]:
    """The step spans of one worker by epoch and step; none may be there twice."""
    found = [
        span for span in spans if span.name == f"afd {role} step" and span.attributes["afd.rank"] == rank
    ]
    keyed = {(span.attributes["afd.epoch"], span.attributes["afd.step"]): span for span in found}
    assert len(keyed) == len(found)
    return keyed


def test_spans_of_both_roles_arrive_and_a_step_is_one_trace_over_them(
    python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with collecting() as collector:
        command = traced(afd_serve(python), collector.endpoint)
        with running(
            command, checkpoints["qwen3-moe"], EngineArguments(), tmp_path / "afd", **OVER_HTTP
        ) as service:
            ask(service.endpoint, {"traceparent": f"00-{CLIENT[0]}-{CLIENT[1]}-01"})
    spans = collector.spans

    # whose they are
    processes = {(span.process["service.name"], span.process["service.instance.id"]) for span in spans}
    assert processes == {("afd-attention", "attention-0"), ("afd-ffn", "ffn-0")}
    kinds = defaultdict(set)
    for span in spans:
        kinds[span.role].add(span.process.get("vllm.process_kind"))
    assert kinds == {"attention": {None, "engine_core", "worker"}, "ffn": {None, "worker"}}

    # vLLM's own: the request, in its client's trace; the start, with our part of it, as one tree in each role
    (request,) = (span for span in spans if span.name == "llm_request")
    assert (request.role, request.trace, request.parent) == ("attention", *CLIENT)
    for role in ("attention", "ffn"):
        assert {"Executor init", "Load model", "AFD handshake", "AFD connect"} <= names(spans, role)
        start = [span for span in spans if span.role == role and span.name == "AFD handshake"]
        (load,) = (span for span in spans if span.role == role and span.name == "Load model")
        assert [span.parent for span in start] == [load.id]
        (host,) = (span for span in spans if span.role == role and span.name == "Executor init")
        assert load.trace == host.trace

    # ours: every step in both roles, in one trace that attention begins
    attention, ffn = steps(spans, "attention"), steps(spans, "ffn")
    assert attention.keys() == ffn.keys()
    assert len({epoch for epoch, _ in attention}) == 1
    real = {key for key, span in attention.items() if span.attributes["afd.kind"] == "real"}
    assert len(real) == 4, "a prefill and three decodes"
    for key, span in attention.items():
        assert not span.parent
        assert (ffn[key].trace, ffn[key].parent) == (span.trace, span.id)
        for name in ("afd.kind", "afd.tokens", "afd.exchanges"):
            assert ffn[key].attributes[name] == span.attributes[name]
    for key in real:
        assert attention[key].attributes["afd.exchanges"] == LAYERS
        exchange, waiting, computing = (
            float(str(spans_of[key].attributes[f"afd.{name}_seconds"]))
            for spans_of, name in ((attention, "exchange"), (attention, "wait"), (ffn, "compute"))
        )
        assert exchange > waiting > 0
        assert exchange > computing > 0


def test_of_two_lanes_the_first_begins_every_trace(
    python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with collecting() as collector:
        command = traced(afd_serve(python, ["--attention-dp", "2"]), collector.endpoint)
        with running(
            command, checkpoints["qwen3-moe"], EngineArguments(), tmp_path / "afd", **OVER_HTTP
        ) as service:
            together(service.endpoint, PROMPTS[:4])
    first, second = (steps(collector.spans, "attention", rank) for rank in ("0-0", "1-0"))
    ffn = steps(collector.spans, "ffn")
    assert first.keys() == second.keys() == ffn.keys()
    for key, span in first.items():
        assert not span.parent
        assert second[key].parent == ffn[key].parent == span.id
        assert len({span.id, second[key].id, ffn[key].id}) == 3
        rows = [int(str(spans[key].attributes["afd.tokens"])) for spans in (first, second, ffn)]
        assert rows[0] + rows[1] == rows[2]


def test_a_collector_that_is_not_there_costs_no_request_and_no_clean_end(
    python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with PortReservation() as port:
        endpoint = f"http://127.0.0.1:{port.port}/v1/traces"
    command = traced(afd_serve(python), endpoint)
    with running(
        command, checkpoints["qwen3-moe"], EngineArguments(), tmp_path / "afd", **OVER_HTTP
    ) as service:
        generation, _ = service.endpoint.complete(PROMPTS[0], 4)
        assert len(generation.token_ids) == 4
