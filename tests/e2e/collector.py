# SPDX-License-Identifier: Apache-2.0
"""A collector of OpenTelemetry spans for tests: OTLP over HTTP, kept in memory."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Span:
    """One span as it arrived; ids in hexadecimal, `parent` empty for the first of a trace."""

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, object]
    process: dict[str, object]
    """The attributes of the process it comes from."""

    @property
    def role(self) -> object:
        """Of the process."""
        return self.process.get("afd.role")


class Collector:
    """What has arrived so far at `endpoint`."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_POST(self) -> None:
                owner._take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Exports come several times a second; they are no news."""

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self.endpoint = f"http://{HOST}:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def spans(self) -> Sequence[Span]:
        """All spans that have arrived, in the order of their arrival."""
        with self._lock:
            return tuple(self._spans)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join(10.0)
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        found = [
            Span(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                plain(span.attributes),
                plain(group.resource.attributes),
            )
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found


def plain(attributes: Sequence[KeyValue]) -> dict[str, object]:
    """Attributes as Python's own values."""
    return {
        item.key: getattr(item.value, kind) if (kind := item.value.WhichOneof("value")) else None
        for item in attributes
    }


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens until the block ends."""
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()
