# SPDX-License-Identifier: Apache-2.0
"""Observed runs (`tests.accuracy.probing`): native vLLM, and attention with a right or a planted FFN."""

import json
from pathlib import Path

import pytest

from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.native import command
from afd_plugin.demo.records import read_record
from tests.accuracy.comparing import Probe, read
from tests.accuracy.planted import VARIABLE, Fault
from tests.accuracy.probing import FOLDER
from tests.e2e.harness import Case, environment, run_case, run_together

ENGINE = EngineArguments()


def probed_native(python: Path, model: Path, folder: Path) -> Probe:
    """vLLM alone."""
    folder.mkdir()
    words = command(
        model,
        folder / "record.json",
        ENGINE,
        extra={"worker_cls": "tests.accuracy.probing.NativeProbe"},
    )
    run_together({"native": [str(python), *words]}, environment({FOLDER: str(folder)}), folder)
    return read(folder, read_record(folder / "record.json"), hidden_of(model))


def probed_afd(
    python: Path,
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault | None = None,
    ffn_model: Path | None = None,
) -> Probe:
    """1A1F; with a `fault`, the FFN is the planted one and serves `ffn_model`."""
    folder.mkdir()
    monkeypatch.setenv(FOLDER, str(folder))
    case = Case(model, engine=ENGINE, attention_worker="tests.accuracy.probing.AttentionProbe")
    if fault is not None:
        monkeypatch.setenv(VARIABLE, fault.value)
        case = case.with_ffn("tests.accuracy.planted", ffn_model or model)
    outcome = run_case(python, case, folder / "run")
    return read(folder, outcome.record, hidden_of(model))


def hidden_of(model: Path) -> int:
    """Width of the hidden states."""
    size: int = json.loads((model / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    return size
