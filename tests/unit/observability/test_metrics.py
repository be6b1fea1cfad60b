# SPDX-License-Identifier: Apache-2.0
"""What workers publish is what an endpoint of the same service collects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from afd_plugin.observability.events import event
from afd_plugin.observability.metrics import MEASURES, Publisher, Reading, readings_of
from afd_plugin.observability.status import StatusServer

WORKER = """
import json, sys
from afd_plugin.observability.metrics import Publisher, readings_of
counts = json.loads(sys.argv[2])
publisher = Publisher("attention", sys.argv[1], lambda: readings_of(counts))
publisher.publish()
counts["tokens"] += 5
publisher.stop()
"""
COLLECTOR = """
from prometheus_client import generate_latest
from afd_plugin.observability.metrics import collected
print(generate_latest(collected()).decode())
"""


def run(code: str, folder: Path, *arguments: str) -> str:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(words, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


def test_counters_of_several_workers_are_collected_from_the_folder_of_the_service(tmp_path: Path) -> None:
    counts = {"steps": {"real": 3, "dummy": 1}, "tokens": 40, "bytes_sent": 1000, "exchange_seconds": 0.5}
    for rank in ("0-0", "1-0"):
        run(WORKER, tmp_path, rank, json.dumps(counts))
    text = run(COLLECTOR, tmp_path)
    for rank in ("0-0", "1-0"):
        assert f'afd:steps_total{{kind="real",rank="{rank}",role="attention"}} 3.0' in text
        assert f'afd:tokens_total{{rank="{rank}",role="attention"}} 45.0' in text
        assert f'afd:bytes_total{{direction="sent",rank="{rank}",role="attention"}} 1000.0' in text


def test_every_reading_names_a_measure_with_the_same_number_of_labels() -> None:
    counts = {
        "steps": {"real": 1},
        "dropped": {"malformed": 2},
        "refused": {"token-rejected": 1},
        "messages_received": 4,
        "bytes_received": 5,
        "wait_seconds": 0.1,
        "announce_seconds": 0.1,
        "compute_seconds": 0.1,
        "graph_steps": 1,
        "microbatched_steps": 1,
        "exchanges": 1,
        "reconnects": 1,
        "strangers": 1,
        "something_else": 7,
    }
    labels = {measure.name: measure.labels for measure in MEASURES}
    readings = list(readings_of(counts))
    assert all(len(reading.labels) == len(labels[reading.name]) for reading in readings)
    assert len(readings) == len(counts) - 1


def test_without_a_folder_nothing_is_published_and_no_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)

    def never() -> list[Reading]:
        raise AssertionError("read although nobody can see it")

    publisher = Publisher("ffn", "0-0", never)
    publisher.stop()


def fetch(server: StatusServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_ready_follows_the_phase_and_health_the_failure() -> None:
    server = StatusServer("127.0.0.1", 0)
    try:
        server.phase = "loading weights"
        assert fetch(server, "/health") == (200, "loading weights\n")
        assert fetch(server, "/ready") == (503, "loading weights\n")
        server.phase, server.serving = "serving", True
        assert fetch(server, "/ready") == (200, "serving\n")
        server.failed = True
        assert fetch(server, "/health")[0] == fetch(server, "/ready")[0] == 503
        assert fetch(server, "/metrics")[0] == 200
        assert fetch(server, "/else")[0] == 404
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        fetch(server, "/health")


def test_an_event_is_one_line_of_pairs_with_epoch_and_step() -> None:
    line = event("failed", epoch=255, step=7, role="ffn", error='said "no"\nthen left', rank=None)
    assert line == 'afd event=failed role=ffn error="said \\"no\\"\\nthen left" epoch=ff step=7'
