# SPDX-License-Identifier: Apache-2.0
import os
import sys
from pathlib import Path

import pytest

from afd_plugin.demo.engine import CPU_ENVIRONMENT, EngineArguments
from afd_plugin.demo.runner import child_environment
from afd_plugin.demo.service import Service, ServiceError, afd_command, native_command

SERVER = """
import http.server, os, pathlib, signal, sys
port, kind = int(sys.argv[1]), sys.argv[2]
if kind == "broken":
    sys.exit("no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
pathlib.Path(os.environ["AFD_ROLE_REPORT_DIR"], "ffn-0-0.json").write_text('{"weight_bytes": 1}')
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def service(kind: str, folder: Path) -> Service:
    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        return [sys.executable, "-c", SERVER, str(port), kind]

    return Service(command, Path("model"), "model", EngineArguments(), folder / kind, dict(os.environ))


def test_a_service_becomes_ready_reports_and_ends(tmp_path: Path) -> None:
    with service("good", tmp_path) as running:
        assert 0 < running.await_ready(30) < 30
        assert running.role_reports() == {"ffn-0-0": {"weight_bytes": 1}}
        assert running.stop(10) == -15


def test_a_server_that_ends_early_is_reported_with_its_log(tmp_path: Path) -> None:
    with service("broken", tmp_path) as running, pytest.raises(ServiceError, match="no such model"):
        running.await_ready(30)


def test_a_server_that_ignores_the_stop_is_an_error_and_is_ended_anyway(tmp_path: Path) -> None:
    with service("deaf", tmp_path) as running:
        running.await_ready(30)
        with pytest.raises(ServiceError, match="did not end within 1 s"):
            running.stop(1)
    assert not running.endpoint.healthy()


def test_a_wait_for_a_server_is_bounded(tmp_path: Path) -> None:
    with service("good", tmp_path) as running, pytest.raises(ServiceError, match="not ready after -1 s"):
        running.await_ready(-1)


def test_native_and_afd_get_the_same_engine_arguments() -> None:
    engine = EngineArguments()
    native = native_command(Path("m"), "name", 1, engine)
    afd = afd_command(Path("m"), "name", 1, engine)
    shared = ["--host", "127.0.0.1", "--port", "1", "--served-model-name", "name", *engine.serving_flags()]
    assert native[-len(shared) :] == afd[-len(shared) :] == shared
    assert "--tensor-parallel-size" not in afd


def test_servers_run_on_the_cpu_cell_and_may_use_byte_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = child_environment()
    assert environment.items() >= CPU_ENVIRONMENT.items()
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"
