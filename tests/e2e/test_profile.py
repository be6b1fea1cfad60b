# SPDX-License-Identifier: Apache-2.0
"""vLLM's own profiler, asked over HTTP, sees both roles, and their traces tell the same steps."""

import gzip
import http.client
import json
import re
from pathlib import Path

import pytest

from afd_plugin.demo.client import Endpoint
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.prompts import PROMPTS
from tests.e2e.services import afd_serve, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.full]


def post(endpoint: Endpoint, path: str) -> int:
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=60)
    try:
        connection.request("POST", path)
        return connection.getresponse().status
    finally:
        connection.close()


def ranges(path: Path) -> set[str]:
    """The names of the plugin's ranges in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {str(event["name"]) for event in events if str(event.get("name", "")).startswith("afd step ")}


def test_traces_of_both_roles_name_the_same_steps_units_and_stages(
    python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    config = {
        "profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }  # fmt: skip

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        return [*afd_serve(python)(model, name, port, engine), "--profiler-config", json.dumps(config)]

    with running(command, checkpoints["qwen3-moe"], EngineArguments(), tmp_path / "afd") as service:
        service.endpoint.complete(PROMPTS[0], 2)
        assert post(service.endpoint, "/start_profile") == http.client.OK
        service.endpoint.complete(PROMPTS[1], 4)
        assert post(service.endpoint, "/stop_profile") == http.client.OK
        service.endpoint.complete(PROMPTS[0], 2)
    seen = [ranges(path) for path in sorted(traces.glob("*.json.gz"))]
    assert len(seen) == 2, "one trace of each role"
    attention, ffn = seen
    assert attention == ffn
    steps = {name for name in attention if re.fullmatch(r"afd step \d+ real", name)}
    assert len(steps) >= 4
    units = {name for name in attention if name.endswith("stage 0")}
    assert len(units) == len(steps) * 4, "four layers, one stage, every step"
