# SPDX-License-Identifier: Apache-2.0
"""An installed plugin without an AFD worker changes nothing about vLLM."""

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from afd_plugin.demo import parity
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.native import ALL_TOGETHER, command
from afd_plugin.demo.records import read_record
from tests.e2e.harness import environment, run_together

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WITH, WITHOUT = {"VLLM_PLUGINS": "afd"}, {"VLLM_PLUGINS": "no-plugin-of-this-name"}
"""vLLM loads the general plugins that this variable names."""

MODULES_OF_THE_PLUGIN = {"afd_plugin"}


def test_the_plugin_is_discovered_exactly_once() -> None:
    assert [entry.value for entry in entry_points(group="vllm.general_plugins", name="afd")] == [
        "afd_plugin:register"
    ]


def test_registries_environment_and_modules_are_those_of_a_vllm_without_the_plugin(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []
    for name, variables in (("with", WITH), ("without", WITHOUT)):
        output = tmp_path / f"{name}.json"
        words = [
            sys.executable,
            "-m",
            "tests.e2e.isolation_probe",
            str(checkpoints["qwen3-moe"]),
            str(output),
        ]
        run_together({name: words}, environment(variables), tmp_path)
        seen.append(json.loads(output.read_text(encoding="utf-8")))
    plugin, native = seen
    assert set(plugin.pop("modules")) - set(native["modules"]) == MODULES_OF_THE_PLUGIN
    assert not {module for module in native.pop("modules") if module.startswith("afd_plugin")}
    assert plugin == native
    assert plugin["out_of_tree"] == []


def test_native_outputs_are_the_same_to_the_bit(
    python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    engine = EngineArguments()
    for name, variables in (("with", WITH), ("without", WITHOUT)):
        words = command(checkpoints["qwen3-moe"], tmp_path / f"{name}.json", engine, ALL_TOGETHER)
        run_together({name: [str(python), *words]}, environment(variables), tmp_path)
    found = parity.compare(read_record(tmp_path / "without.json"), read_record(tmp_path / "with.json"))
    assert found.bitwise_equal == found.logprob_entries == 8 * 32 * 3
