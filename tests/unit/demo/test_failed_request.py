# SPDX-License-Identifier: Apache-2.0
"""A server that answers with an error is quoted: its log is gone when the demo is over."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.recipes import RECIPES
from afd_plugin.demo.runner import serve_both
from afd_plugin.demo.service import ServiceError

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200)
    def do_POST(self):
        print("the root cause of", sys.argv[2], flush=True)
        self.answer(500)
    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(kind: str, model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
    return [sys.executable, "-c", SERVER, str(port), kind]


def test_the_log_of_a_server_that_failed_a_request_is_in_the_error(tmp_path: Path) -> None:
    (recipe, *_) = RECIPES.values()
    commands = {kind: lambda *words, kind=kind: command(kind, *words) for kind in ("native", "afd")}
    with pytest.raises(ServiceError) as caught:
        serve_both(recipe, tmp_path, tmp_path / "run", Console(quiet=True), commands)
    assert "answered 500" in str(caught.value)
    assert "the root cause of native" in str(caught.value)
