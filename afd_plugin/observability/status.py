# SPDX-License-Identifier: Apache-2.0
"""A small HTTP endpoint for a process that has none: ``/health``, ``/ready``, ``/metrics``.

========== ==================================================================================
path       answer
========== ==================================================================================
/health    200 while the process lives and nothing has failed, else 503
/ready     200 once it serves, 503 before and after, with the phase as text
/metrics   Prometheus text of all processes of this service
========== ==================================================================================
"""

from __future__ import annotations

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

from afd_plugin.observability.metrics import collected

STATUS_VARIABLE = "AFD_STATUS"
"""Environment variable with the ``host:port`` of the endpoint."""

_SOCKET_TIMEOUT_S = 10.0


class StatusServer:
    """Serves the endpoint from threads of its own until :meth:`close`.

    Args:
        host: Where to listen.
        port: The port; 0 takes a free one.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        self.phase = "starting"
        self.serving = False
        self.failed = False
        owner = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _SOCKET_TIMEOUT_S
            server_version = "afd"
            sys_version = ""

            def do_GET(self) -> None:
                status, content_type, body = owner.answer(self.path.partition("?")[0])
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Probes come every few seconds; they are no news."""

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in host else AF_INET
            daemon_threads = True

        self._server = Server((host, port), Handler)
        self.port: int = self._server.server_address[1]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="afd-status", daemon=True)
        self._thread.start()

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body for ``path``."""
        plain = "text/plain; charset=utf-8"
        if path == "/health":
            status = HTTPStatus.SERVICE_UNAVAILABLE if self.failed else HTTPStatus.OK
            return status, plain, f"{self.phase}\n".encode()
        if path == "/ready":
            ready = self.serving and not self.failed
            status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
            return status, plain, f"{self.phase}\n".encode()
        if path == "/metrics":
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(collected())
        return HTTPStatus.NOT_FOUND, plain, b"paths: /health /ready /metrics\n"

    def close(self) -> None:
        """Stop listening and end the threads; idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(5.0)
        self._server.server_close()
