# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from afd_plugin.cli.status import Row, ask, digest, local_rows, run_status, table
from afd_plugin.observability.status import StatusServer

METRICS = """# TYPE afd:steps counter
afd:steps_total{kind="real",rank="0-0",role="attention"} 3.0
afd:steps_total{kind="dummy",rank="0-0",role="attention"} 1.0
# TYPE afd:exchanges counter
afd:exchanges_total{rank="0-0",role="attention"} 8.0
# TYPE afd:exchange_seconds counter
afd:exchange_seconds_total{rank="0-0",role="attention"} 0.016
# TYPE afd:peer_up gauge
afd:peer_up{peer="a",rank="0-0",role="attention"} 1.0
afd:peer_up{peer="b",rank="0-0",role="attention"} 0.0
"""


def state(folder: Path, pid: int, **children: object) -> None:
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"pid": pid, "children": children}))


def test_services_of_living_launchers_are_found_and_broken_files_are_not_in_the_way(tmp_path: Path) -> None:
    state(
        tmp_path / "afd-a",
        os.getpid(),
        **{"attention-0": {"pid": 1, "phase": "serving", "url": "http://example"}},
    )
    state(tmp_path / "afd-b", 2**22 + 1, **{"ffn-0": {"pid": 2, "phase": "serving"}})
    (tmp_path / "afd-c").mkdir()
    (tmp_path / "afd-c" / "state.json").write_text("{")
    assert list(local_rows(tmp_path)) == [Row("attention-0", "http://example", 1, "serving")]


def test_a_row_sums_the_workers_and_counts_the_peers_that_are_up() -> None:
    row = Row("attention-0")
    digest(row, METRICS)
    assert (row.steps, row.exchanges, row.exchange_ms, row.peers) == (4, 8, 2.0, "1/2")


def test_restarts_come_from_the_launcher_and_from_the_lane_that_met_most_new_ffns(tmp_path: Path) -> None:
    ffn = {"pid": 2, "phase": "serving", "restarts": 3}
    state(tmp_path / "afd-a", os.getpid(), **{"ffn-0": ffn})
    (row,) = local_rows(tmp_path)
    assert row.restarts == 3
    met = Row("attention-0")
    counters = [f'afd:reconnects_total{{role="attention",rank="{lane}-0"}} {lane + 1}.0' for lane in range(2)]
    digest(met, "\n".join(["# TYPE afd:reconnects_total counter", *counters, ""]))
    assert met.restarts == 2
    assert "restarts" in table([met]).splitlines()[0]


def test_an_endpoint_that_is_well_is_said_to_be_and_one_that_is_gone_is_not() -> None:
    server = StatusServer("127.0.0.1", 0)
    row = Row("ffn-0", f"http://{server.address}")
    ask(row)
    assert row.well
    server.close()
    ask(row)
    assert not row.well
    assert row.problem


def test_the_exit_code_says_whether_everything_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    server = StatusServer("127.0.0.1", 0)
    url = f"http://{server.address}"
    try:
        assert run_status([url], as_json=False) == 0
        assert "yes" in capsys.readouterr().out
        server.failed = True
        assert run_status([url], as_json=True) == 1
        assert json.loads(capsys.readouterr().out)[0]["well"] is False
    finally:
        server.close()


def test_the_table_is_aligned() -> None:
    lines = table([Row("attention-0", "u", 1, "serving", True), Row("x")]).splitlines()
    assert len(lines) == 3
    assert lines[0].index("phase") == lines[1].index("serving")
