# SPDX-License-Identifier: Apache-2.0
"""The accuracy part of the GPU go: what is served with which words, and what its verdict is. Answers are planted."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qualify.accuracy import gate
from qualify.accuracy.architectures import ARCHITECTURES
from qualify.accuracy.harness import HarnessFailed
from qualify.accuracy.scoring import Row, Side
from qualify.accuracy.sides import Layout, Place
from qualify.gpu import accuracy
from qualify.gpu.accuracy import Cell
from qualify.gpu.host import Host

MODEL = "trained-qwen3-moe"
EAGER, GRAPH = (Cell(MODEL, mode, Layout.ONE_ONE) for mode in ("eager", "graph"))
STAGED = Cell(MODEL, "graph", Layout.ONE_ONE, 2)


class Answers:
    """Stands in for serving and asking. `lost` rows are answered wrongly by AFD, `changed` ones otherwise."""

    def __init__(self) -> None:
        self.lost = self.changed = 0
        self.failing = ""
        self.split, self.replayed = 3000, 9000
        self.places: dict[str, Place] = {}

    def __call__(
        self, layout: Layout, model: Path, rows: Mapping[str, int], folder: Path, *_: Any, **how: Any
    ) -> tuple[Side, float]:
        name = folder.name
        self.places[name] = how["place"]
        if name == self.failing:
            raise HarnessFailed("the server answered 500")
        afd, staged, graph = layout is not Layout.NATIVE, name.endswith("-dbo"), "-graph-" in name
        if afd:
            (folder / "service").mkdir(parents=True)
            counts = {
                "graph_steps": self.replayed * graph,
                "microbatched_steps": self.split * staged,
                "exchanges": 9,
                "tensor_names": ["a"],
            }
            for role in ("attention", "ffn"):
                (folder / "service" / f"{role}-0-0.json").write_text(json.dumps(counts))
        answered = {}
        for task, count in rows.items():
            right = [number % 100 < 85 and not (afd and number < self.lost) for number in range(count)]
            said = ["other" if afd and number < self.changed else "yes" for number in range(count)]
            answered[task] = tuple(Row(n, right[n], (said[n],)) for n in range(count))
        return Side(answered, "r" * 64, "s" * 64), 100.0


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Answers:
    found = Answers()
    monkeypatch.setattr(gate, "answers", found)
    return found


def run(tmp_path: Path, seconds: float = 400.0, **settings: Any) -> dict[str, Any]:
    return accuracy.accuracy(Host(tmp_path, time.monotonic() + seconds, settings))


def test_native_and_afd_are_served_with_the_same_words_but_for_afds_own() -> None:
    """Memory, compile mode and graph mode above all; the eager cells name no compilation at all."""
    native = GRAPH.reference
    assert native == Cell(MODEL, "graph", Layout.NATIVE) == STAGED.reference
    own = ("--connector", "CudaIpcAFDConnector")
    assert GRAPH.words == (*native.words, *own)
    assert STAGED.words == (*native.words, *own, *accuracy.STAGED)
    assert native.engine == GRAPH.engine == STAGED.engine
    mode = json.loads(native.words[native.words.index("--compilation-config") + 1])
    assert mode == {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}
    assert "--compilation-config" not in EAGER.words
    assert EAGER.engine.enforce_eager
    assert not GRAPH.engine.enforce_eager
    command = STAGED.layout.command(Path("m"), "trained", 9, STAGED.engine)
    assert command[2:4] == ["afd_plugin.cli", "serve"]
    assert "--no-enforce-eager" in command


def test_both_models_are_asked_in_both_modes_natively_and_by_afd_in_one_and_two_stages() -> None:
    """Twelve cells with names of their own, natives first."""
    found = accuracy.cells(list(ARCHITECTURES), ["eager", "graph"])
    assert len({cell.name for cell in found}) == len(found) == 12
    assert [cell.layout for cell in found[:4]] == [Layout.NATIVE] * 4
    assert {cell.reference for cell in found} == set(found[:4])


def test_equal_answers_of_all_rows_pass_with_their_counts(planted: Answers, tmp_path: Path) -> None:
    """Requested and scored rows, p-values, digests and counters are in the evidence; it is plain data."""
    result = json.loads(json.dumps(run(tmp_path)))
    assert result["passed"]
    assert not result["faults"]
    assert not result["diagnostic"]
    assert sum(result["requested"][MODEL].values()) == result["sides"][GRAPH.name]["scored"] == 1600
    one = result["comparisons"][STAGED.name]
    assert (one["rows"], one["lost"], one["p_value"], one["bitwise"]) == (1600, 0, 1.0, False)
    assert result["comparisons"][EAGER.name]["bitwise"]
    assert result["sides"][STAGED.name]["attention"]["microbatched_steps"] == planted.split
    assert result["sides"][GRAPH.name]["samples_sha256"] == "s" * 64
    assert len(result["comparisons"]) == 8
    assert result["metrics"][f"{STAGED.name}_rows"] == 1600
    assert result["metrics"][f"{GRAPH.name}_p_value"] == 1.0
    place = planted.places[STAGED.name]
    assert place.words == STAGED.words
    assert place.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_one_differing_row_fails_where_batches_are_the_same_and_not_with_microbatches(
    planted: Answers, tmp_path: Path
) -> None:
    planted.changed = 1
    result = run(tmp_path)
    assert not result["passed"]
    assert len(result["faults"]) == 4
    assert all("equal to the bit" in fault and "-dbo" not in fault for fault in result["faults"])
    assert sum(result["comparisons"][STAGED.name]["differing"].values()) > 0


def test_lost_rows_fail_with_microbatches_too(planted: Answers, tmp_path: Path) -> None:
    planted.lost = 30
    faults = run(tmp_path)["faults"]
    assert any(fault.startswith(f"{STAGED.name}: AFD lost ") for fault in faults)


@pytest.mark.parametrize("settings", [{"rows": 3}, {"models": [MODEL]}, {"modes": ["eager"]}])
def test_a_limited_run_is_a_diagnosis_and_never_passes(
    settings: dict[str, Any], planted: Answers, tmp_path: Path
) -> None:
    result = run(tmp_path, **settings)
    assert result["diagnostic"]
    assert not result["passed"]


def test_a_cell_that_gave_no_answers_fails_alone(planted: Answers, tmp_path: Path) -> None:
    """What hangs on a native side that is not there is named as well; the rest is judged."""
    planted.failing = GRAPH.reference.name
    result = run(tmp_path)
    assert not result["passed"]
    assert "HarnessFailed" in result["sides"][planted.failing]["error"]
    assert [fault.partition(":")[0] for fault in result["faults"]] == [
        planted.failing, GRAPH.name, STAGED.name,
    ]  # fmt: skip
    assert result["comparisons"][EAGER.name]["faults"] == []


def test_microbatches_and_graphs_that_did_not_run_are_seen_in_the_counters(
    planted: Answers, tmp_path: Path
) -> None:
    planted.split, planted.replayed = 5, 7
    faults = run(tmp_path)["faults"]
    assert f"{STAGED.name}: 5 steps ran in two stages, fewer than its 1600 rows have prefills" in faults
    assert f"{GRAPH.name}: 7 steps replayed a graph, fewer than its 1600 rows have decodes" in faults
    assert not any(fault.startswith(f"{EAGER.name}:") for fault in faults)


def test_without_time_nothing_is_started_and_nothing_passes(planted: Answers, tmp_path: Path) -> None:
    result = run(tmp_path, seconds=50.0)
    assert planted.places == {}
    assert not result["passed"]
    assert all("not run" in fault or "no native side" in fault for fault in result["faults"])
