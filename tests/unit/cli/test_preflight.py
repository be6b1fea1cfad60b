# SPDX-License-Identifier: Apache-2.0
"""`afd check` finds what would make serving fail, without importing vLLM."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from afd_plugin.cli import preflight
from afd_plugin.cli.devices import COMPILERS, Gpu, check_compiler
from afd_plugin.cli.preflight import Check, Verdict
from afd_plugin.errors import ConfigRefused
from afd_plugin.topology import Topology

ONE = Topology()


@pytest.mark.parametrize(
    ("version", "verdict"),
    [((3, 9), Verdict.FAIL), ((3, 10), Verdict.OK), ((3, 14), Verdict.OK), ((3, 15), Verdict.FAIL)],
)
def test_python(version: tuple[int, int], verdict: Verdict) -> None:
    assert preflight.check_python(version).verdict is verdict


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        (None, Verdict.FAIL),
        ("0.27.0", Verdict.FAIL),
        ("0.28.0", Verdict.OK),
        ("0.28.0+cpu", Verdict.OK),
    ],
)
def test_vllm_must_be_the_exact_version(version: str | None, verdict: Verdict) -> None:
    assert preflight.check_vllm(version).verdict is verdict


def test_the_version_is_read_from_vllms_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('vLLM was imported')")
    (package / "_version.py").write_text("x = 1\n__version__ = version = '0.28.0+cpu'\n")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert preflight.vllm_version() == "0.28.0+cpu"


@pytest.mark.parametrize(
    ("cuda", "cpu", "verdict"),
    [
        (True, True, Verdict.FAIL),
        (True, False, Verdict.OK),
        (False, True, Verdict.OK),
        (False, False, Verdict.NOTE),
    ],
)
def test_both_builds_of_vllm_together_are_an_error(cuda: bool, cpu: bool, verdict: Verdict) -> None:
    assert preflight.check_distributions(cuda, cpu).verdict is verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (["afd_plugin:register"], Verdict.OK),
        ([], Verdict.FAIL),
        (["afd_plugin:register"] * 2, Verdict.FAIL),
        (["afd_plugin:register", "afd_plugin.old:register_afd"], Verdict.FAIL),
    ],
)
def test_the_plugin_is_registered_exactly_once(values: list[str], verdict: Verdict) -> None:
    assert preflight.check_entry_points(values).verdict is verdict


GPUS = (Gpu("0", "GPU-a", 1, 1), Gpu("1", "GPU-b", 1, 1))


@pytest.mark.parametrize(
    ("gpus", "device", "visible", "verdict", "text"),
    [
        ((), "cpu", None, Verdict.NOTE, "without one"),
        ((), "cuda", None, Verdict.FAIL, "no GPU"),
        (GPUS, "cuda", None, Verdict.OK, "attention on 0, FFN on 1"),
        (GPUS[:1], "cuda", None, Verdict.NOTE, "CudaIpcAFDConnector"),
        (GPUS, "cuda", "0,0", Verdict.FAIL, "GPU-a is named twice"),
        (GPUS, "cuda", "0,GPU-a", Verdict.FAIL, "GPU-a is named twice"),
    ],
)
def test_gpus(gpus: tuple[Gpu, ...], device: str, visible: str | None, verdict: Verdict, text: str) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    check, *extension = preflight.check_gpus(gpus, device, ONE, env)
    assert [one.subject for one in extension] == ["extension"] * (
        verdict is not Verdict.FAIL and device == "cuda"
    )
    assert check.verdict is verdict
    assert text in check.text


def test_too_little_memory_is_found() -> None:
    assert preflight.check_memory(1 << 30, ONE).verdict is Verdict.FAIL
    assert preflight.check_memory(64 << 30, ONE).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("config", "verdict", "text"),
    [
        ({"architectures": ["DeepseekV2ForCausalLM"], "n_routed_experts": 8}, Verdict.OK, "8 experts"),
        ({"architectures": ["Qwen3ForCausalLM"]}, Verdict.FAIL, "no MoE layer"),
        (
            {"architectures": ["A"], "num_experts": 4, "quantization_config": {}},
            Verdict.FAIL,
            "quantised",
        ),
        ({"architectures": ["V"], "text_config": {"num_experts": 16}}, Verdict.OK, "16 experts"),
        ([], Verdict.FAIL, "no JSON object"),
    ],
)
def test_the_model_has_experts(tmp_path: Path, config: object, verdict: Verdict, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    check = preflight.check_model(str(tmp_path))
    assert check.verdict is verdict
    assert text in check.text


def test_a_folder_without_a_config_and_a_name_of_a_hub(tmp_path: Path) -> None:
    assert preflight.check_model(str(tmp_path)).verdict is Verdict.FAIL
    assert preflight.check_model("organisation/model").verdict is Verdict.NOTE
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in preflight.check_model(str(tmp_path)).text


def test_a_port_in_use_fails_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "list_gpus", lambda: ())
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        checks = preflight.run_checks(None, "cpu", ONE, [("127.0.0.1", port)], {})
    row = next(check for check in checks if check.subject == f"port {port}")
    assert row.verdict is Verdict.FAIL
    assert preflight.failed(checks)
    assert f"port {port}" in preflight.table(checks)


def test_an_unsound_topology_and_a_wrong_variable_are_rows_not_tracebacks() -> None:
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    checks = preflight.run_checks(None, "cpu", Topology(ffn_dp=2), [], env)
    verdicts = {check.subject: check.verdict for check in checks}
    assert verdicts["topology"] is Verdict.FAIL
    assert verdicts["environment"] is Verdict.FAIL


def test_notes_do_not_fail() -> None:
    assert not preflight.failed([Check("a", Verdict.NOTE, ""), Check("b", Verdict.OK, "")])


@pytest.mark.parametrize(
    ("device", "variable", "present", "found"),
    [
        ("cpu", "", "g++", "g++"),
        ("cpu", "mine -O2", "mine", "mine"),
        ("cuda", "", "clang", "clang"),
        ("cpu", "", "gcc", None),
        ("cpu", "mine", "g++", None),
        ("cuda", "", "", None),
    ],
)
def test_a_compiler_is_there_before_anything_is_started(
    tmp_path: Path, device: str, variable: str, present: str, found: str | None
) -> None:
    """Without one vLLM comes up, and ends at its first request."""
    if present:
        (tmp_path / present).write_text("#!/bin/sh\n")
        (tmp_path / present).chmod(0o755)
    name, _ = COMPILERS[device]
    env = {"PATH": str(tmp_path), name: variable}
    if found is None:
        with pytest.raises(ConfigRefused, match=f"vLLM compiles kernels while it serves.*name one in {name}"):
            check_compiler(device, env)
    else:
        assert check_compiler(device, env) == found
