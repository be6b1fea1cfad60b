# SPDX-License-Identifier: Apache-2.0
"""What a session does on a host that is not the GPU cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from qualify import cells
from qualify.gpu import __main__ as command
from qualify.gpu import cell, e2e

H200 = "NVIDIA H200"
INSTALLED = {"vllm": "0.28.0", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("name", "devices", "installed", "said"),
    [
        ("h200x1", [], INSTALLED, "no NVIDIA GPU answers"),
        ("h200x1", ["NVIDIA L4"], INSTALLED, "it has NVIDIA L4, and 1 x NVIDIA H200 are needed"),
        ("h200x2", [H200], INSTALLED, "2 x NVIDIA H200 are needed"),
        ("h200x1", [H200], {"torch": "2.13.0"}, "vllm is not installed and must be 0.28.0"),
        ("h200x1", [H200], {**INSTALLED, "torch": "2.11.0"}, "torch is 2.11.0 and must be 2.13.0"),
        ("h200x1", [H200, H200], INSTALLED, None),
        ("h200x2", [H200, H200], INSTALLED, None),
    ],
)
def test_a_host_that_is_not_the_cell_is_named_in_one_line(
    name: str, devices: list[str], installed: dict[str, str], said: str | None
) -> None:
    reason = cell.refusal(cell.CELLS[name], lambda: devices, lambda wanted: installed.get(wanted, ""))
    if said is None:
        assert reason is None
        return
    assert reason is not None
    assert said in reason
    assert name in reason
    assert "\n" not in reason


def test_the_cells_are_those_of_the_cell_file() -> None:
    for name, known in cell.CELLS.items():
        written = cells.load(name)
        assert (written.devices, written.device_name) == (known.devices, known.device_name)
        assert dict(known.distributions) == {"vllm": written.vllm, "torch": written.torch.partition("+")[0]}


def test_the_session_fails_with_one_line_and_never_skips(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert e2e.main([]) == 2
    assert e2e.main(["--cell", "h200x9"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "not the cell h200x1" in first
    assert "'h200x9' is no GPU cell" in second


def test_the_body_refuses_before_it_writes_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    out = tmp_path / "out"
    assert command.main(["control", "--cell", "h200x2", "--out", str(out)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], ["tests/gpu_e2e", "--durations=20", "--gpus=1"]),
        (["all", "--cell", "h200x2"], ["tests/gpu_e2e", "--durations=20", "--gpus=2", "--full"]),
        (
            ["tests/gpu_e2e/test_contract.py", "-k", "nccl"],
            ["--durations=20", "--gpus=1", "tests/gpu_e2e/test_contract.py", "-k", "nccl"],
        ),
    ],
)
def test_words_of_the_session_become_those_of_pytest(words: list[str], given: list[str]) -> None:
    assert e2e.pytest_words(words, cell.named(words)) == given


def test_only_a_named_gpu_cell_takes_a_session_out_of_the_shared_environment() -> None:
    assert cell.asks_for_gpu(["--cell", "h200x1"])
    assert cell.asks_for_gpu(["--cell=h200x2"])
    assert not cell.asks_for_gpu(["--cell", "cpu"])
    assert not cell.asks_for_gpu([])
