# SPDX-License-Identifier: Apache-2.0
"""Both trained models through lm-eval on one GPU: native and `afd serve`, eager and with graphs, microbatches off and
on. What is asked, how it is scored and judged is `qualify.accuracy`'s, as on the CPU.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from afd_plugin.demo.engine import EngineArguments
from qualify.accuracy import checkpoints, data, gate, sides
from qualify.accuracy.architectures import ARCHITECTURES
from qualify.accuracy.scoring import Side, differing
from qualify.accuracy.sides import Layout, Place
from qualify.accuracy.statistics import smallest_visible_share
from qualify.accuracy.verdict import Comparison
from qualify.gpu.engines import ENVIRONMENT, flags
from qualify.gpu.host import GRAPH, START_S, Host

SERVICES = 8
"""Served at once; a pair is four processes that spin while one of them computes."""

ENDING_S = 30.0
"""Of what is left, kept for ending a server and writing down."""

STARTING_S = 60.0
"""What a server at least takes to start; with less left none is started."""

MEMORY: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.03,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_flashinfer_autotune": False,
}
CONNECTOR = "CudaIpcAFDConnector"
STAGED = ("--microbatches", "2", "--dbo-prefill-token-threshold", "4")
"""Every question is longer than four tokens, so its prefill, one request alone, is split within it."""

COUNTERS = (
    "steps", "graph_steps", "microbatched_steps", "tokens", "exchanges", "device_steps",
    "eager", "captures", "replays", "uncaptured",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One served model: in which mode, natively or by AFD in one or two stages."""

    model: str
    mode: str
    layout: Layout
    microbatches: int = 1

    @property
    def name(self) -> str:
        """As the evidence and the folders call it."""
        stages = "-dbo" if self.microbatches > 1 else ""
        return f"{self.model}-{self.mode}-{self.layout.value}{stages}"

    @property
    def reference(self) -> Cell:
        """The native side of the same model and mode."""
        return replace(self, layout=Layout.NATIVE, microbatches=1)

    @property
    def engine(self) -> EngineArguments:
        """The CPU gate's engine arguments, in this mode."""
        return replace(sides.ENGINE, enforce_eager=self.mode == "eager")

    @property
    def words(self) -> tuple[str, ...]:
        """What the command says beside: the same of native and AFD, but for AFD's own options."""
        mode = {} if self.mode == "eager" else {"compilation_config": GRAPH["compilation_config"]}
        own = () if self.layout is Layout.NATIVE else ("--connector", CONNECTOR)
        return (*flags({**MEMORY, **mode}), *own, *(STAGED if self.microbatches > 1 else ()))


@dataclass(frozen=True)
class Answered:
    """What one cell gave: its judged answers, its time, and what its workers counted."""

    side: Side
    seconds: float
    attention: Mapping[str, Any]
    ffn: Mapping[str, Any]


def cells(models: list[str], modes: list[str]) -> list[Cell]:
    """Natives first, as every comparison needs one; microbatches last."""
    pairs = [(name, mode) for name, mode in product(models, modes)]
    kinds = ((Layout.NATIVE, 1), (Layout.ONE_ONE, 1), (Layout.ONE_ONE, 2))
    return [Cell(name, mode, layout, stages) for layout, stages in kinds for name, mode in pairs]


def accuracy(host: Host) -> dict[str, Any]:
    """1,600 rows of each model from each cell, one request in flight; equal to native's bits where batches are the
    same, and no worse by McNemar's test where microbatches change the sizes of kernels.

    Settings: `rows` (the first of each task: a diagnosis that never passes), `services` (at once), `models`, `modes`.
    """
    rows: int | None = host.setting("rows", None)
    models = list(host.setting("models", list(ARCHITECTURES)))
    chosen = cells(models, list(host.setting("modes", ["eager", "graph"])))
    folders = {name: checkpoints.checked(ARCHITECTURES[name]) for name in models}
    asked: dict[str, tuple[Path, dict[str, int]]] = {}
    for name in models:
        questions = host.logs / "accuracy" / name / "questions"
        questions.mkdir(parents=True)
        asked[name] = questions, data.write(questions, data.MIXES[name], rows)
    with ThreadPoolExecutor(host.setting("services", SERVICES)) as pool:
        found = dict(
            zip(
                chosen,
                pool.map(lambda c: answered(host, c, folders[c.model], *asked[c.model]), chosen),
                strict=True,
            )
        )
    result = judged(found)
    complete = rows is None and {(cell.model, cell.mode) for cell in chosen} == set(
        product(ARCHITECTURES, ("eager", "graph"))
    )
    return {
        "diagnostic": not complete,
        "requested": {name: requested for name, (_, requested) in asked.items()},
        "questions": {name: data.digest(questions) for name, (questions, _) in asked.items()},
        "engine": {
            **{key: value for key, value in sides.ENGINE.keywords().items() if key != "enforce_eager"},
            **MEMORY,
        },
        **result,
        "passed": complete and not result["faults"],
    }


def answered(
    host: Host, cell: Cell, model: Path, questions: Path, requested: Mapping[str, int]
) -> Answered | str:
    """One cell's answers, or why there are none."""
    left = host.left() - ENDING_S
    if left < STARTING_S:
        return f"not run: {host.left():.0f} s of the budget were left"
    folder = host.logs / "accuracy" / cell.name
    place = Place({**os.environ, **ENVIRONMENT}, min(START_S, left), cell.words)
    started = time.monotonic()
    try:
        side, seconds = gate.answers(
            cell.layout, model, requested, folder, questions,
            engine=cell.engine, place=place, timeout_s=max(STARTING_S, left - STARTING_S),
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - this cell's outcome, written down; the others go on
        return f"{type(error).__name__} after {time.monotonic() - started:.0f} s: {error}"[-4000:]
    print(f"accuracy: {cell.name} {sum(side.right)} of {side.scored} right in {seconds:.0f} s", flush=True)
    return Answered(side, seconds, counted(folder, "attention"), counted(folder, "ffn"))


def counted(folder: Path, role: str) -> dict[str, Any]:
    """What a role's worker wrote when it ended; empty for native, which writes nothing."""
    path = folder / "service" / f"{role}-0-0.json"
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {key: value for key, value in report.items() if key in COUNTERS}


def judged(found: Mapping[Cell, Answered | str]) -> dict[str, Any]:
    """Sides, comparisons and one sentence for each reason not to pass."""
    faults: list[str] = []
    compared: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    for cell, outcome in found.items():
        if isinstance(outcome, str):
            faults.append(f"{cell.name}: {outcome}")
            continue
        if cell.layout is Layout.NATIVE:
            continue
        faults += [f"{cell.name}: {fault}" for fault in uncounted(cell, outcome)]
        native = found[cell.reference]
        if isinstance(native, str):
            faults.append(f"{cell.name}: there is no native side to compare it with")
            continue
        comparison = Comparison.of(native.side, outcome.side, bitwise=cell.microbatches == 1)
        faults += [f"{cell.name}: {fault}" for fault in comparison.faults()]
        compared[cell.name] = described(comparison)
        metrics |= comparison.metrics(cell.name)
    return {
        "sides": {cell.name: account(one) for cell, one in found.items()},
        "comparisons": compared,
        "metrics": metrics,
        "native_graph_against_eager": {
            cell.model: differing(eager.side, one.side)
            for cell, one in found.items()
            if cell.layout is Layout.NATIVE
            and cell.mode == "graph"
            and isinstance(one, Answered)
            and isinstance(eager := found.get(replace(cell, mode="eager")), Answered)
        },
        "faults": faults,
    }


def uncounted(cell: Cell, outcome: Answered) -> tuple[str, ...]:
    """What the workers' counters say against the cell having run as its name promises."""
    split = outcome.attention.get("microbatched_steps", 0)
    replayed, scored = outcome.attention.get("graph_steps", 0), outcome.side.scored
    said = []
    if not outcome.attention or not outcome.ffn.get("exchanges"):
        said.append("its workers left no report of exchanges")
    if cell.microbatches > 1 and split < scored:
        said.append(f"{split} steps ran in two stages, fewer than its {scored} rows have prefills")
    if cell.microbatches == 1 and split:
        said.append(f"{split} steps ran in two stages, and none should")
    if replayed and cell.mode == "eager":
        said.append(f"{replayed} steps replayed a graph in eager mode")
    if replayed < scored and cell.mode == "graph":
        said.append(f"{replayed} steps replayed a graph, fewer than its {scored} rows have decodes")
    return tuple(said)


def account(outcome: Answered | str) -> dict[str, Any]:
    """One side's scores, counts, digests and speed."""
    if isinstance(outcome, str):
        return {"error": outcome}
    side = outcome.side
    return {
        "scored": side.scored,
        "right": sum(side.right),
        "by_task": {
            task: {"scored": len(rows), "right": sum(row.right for row in rows)}
            for task, rows in side.rows.items()
        },
        "seconds": round(outcome.seconds, 1),
        "rows_per_s": round(side.scored / outcome.seconds, 1),
        "results_sha256": side.results,
        "samples_sha256": side.samples,
        "attention": outcome.attention,
        "ffn": outcome.ffn,
    }


def described(comparison: Comparison) -> dict[str, Any]:
    """All that the comparison says, and why it does not pass."""
    pooled = comparison.pooled
    return {
        "bitwise": comparison.bitwise,
        "rows": pooled.rows,
        "native": round(pooled.native, 4),
        "afd": round(pooled.afd, 4),
        "lost": pooled.lost,
        "won": pooled.won,
        "p_value": pooled.p_value,
        "lost_won_by_task": {task: [pair.lost, pair.won] for task, pair in comparison.by_task.items()},
        "differing": dict(comparison.differing),
        "smallest_visible_drop": comparison.visible_drop,
        "smallest_visible_share_by_equality": smallest_visible_share(pooled.rows)
        if comparison.bitwise
        else None,
        "faults": list(comparison.faults()),
    }
