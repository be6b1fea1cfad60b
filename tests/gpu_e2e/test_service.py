# SPDX-License-Identifier: Apache-2.0
"""Real engines on the GPU, by the bodies of `qualify.gpu`; each runs once, its cases are judged one by one.

What is compared natively, and why an answer may differ, is said in those bodies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from qualify.gpu import clients, faults, mps, parity, parts
from qualify.gpu.host import Host
from qualify.gpu.parity import ParityCase

pytestmark = pytest.mark.timeout(1800)

CORE = (
    "deepseek-v2-graph-gate-ffn",
    "qwen3-moe-eager-gate-attention",
    "deepseek-v3-graph-gate-attention",
    "deepseek-v2-graph-gate-ffn-shared-attention",
    # across two GPUs
    "deepseek-v2-graph-gate-ffn-nccl",
    "deepseek-v2-graph-gate-ffn-nvlink",
    "qwen3-moe-graph-gate-attention-nccl-dbo",
)
"""What the landing chain runs; everything else is full."""

ONE_GPU = (*parity.DEFAULT_CASES, *parity.REPAIRED_CASES, *parity.APART_CASES, *parity.SHARED_CASES)


def ids(cases: Sequence[ParityCase]) -> list[Any]:
    return [
        pytest.param(case.name, marks=() if case.name in CORE else pytest.mark.full, id=case.name)
        for case in cases
    ]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module", autouse=True)
def daemon() -> Iterator[None]:
    with mps.daemon() as running:
        assert running, "several roles on one GPU without the MPS daemon take turns in time slices"
        yield


def run(body: Callable[[Host], Any], logs: Path, gpus: int = 1, **settings: Any) -> Any:
    return body(Host(logs, time.monotonic() + 1500, settings, gpus))


def compared(cases: Sequence[ParityCase], logs: Path, gpus: int) -> Mapping[str, Any]:
    result = run(parity.parity, logs, gpus, cases=[vars(case) for case in cases])
    return {outcome["case"]: outcome for outcome in result["cases"]}


@pytest.fixture(scope="module")
def one_gpu(request: pytest.FixtureRequest, logs: Path) -> Mapping[str, Any]:
    full = request.config.getoption("--full")
    return compared([case for case in ONE_GPU if full or case.name in CORE], logs, 1)


@pytest.fixture(scope="module")
def two_gpus(request: pytest.FixtureRequest, logs: Path) -> Mapping[str, Any]:
    full = request.config.getoption("--full")
    return compared([case for case in parity.NVLINK_CASES if full or case.name in CORE], logs, 2)


def test_native_vllm_serves_and_the_extension_s_kernels_are_exact(logs: Path) -> None:
    assert run(parts.control, logs)["passed"]


@pytest.mark.parametrize("name", ids(ONE_GPU))
def test_answers_are_native_s(name: str, one_gpu: Mapping[str, Any]) -> None:
    assert parity.as_promised(one_gpu[name]), one_gpu[name]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", ids(parity.NVLINK_CASES))
def test_answers_across_two_gpus_are_native_s(name: str, two_gpus: Mapping[str, Any]) -> None:
    assert parity.as_promised(two_gpus[name]), two_gpus[name]


def test_a_role_killed_while_graphs_replay_ends_the_other_and_frees_the_gpu(logs: Path) -> None:
    outcome = run(faults.faults, logs)
    assert outcome["passed"], outcome


@pytest.mark.gpus(2)
def test_a_role_killed_on_its_own_gpu_ends_the_other(logs: Path) -> None:
    outcome = run(faults.faults, logs, 2)
    assert outcome["passed"], outcome


@pytest.mark.full
def test_clients_at_once_with_chunked_and_cached_prefills_get_native_s_answers(logs: Path) -> None:
    outcome = run(clients.clients, logs)
    assert outcome["passed"], outcome


@pytest.mark.full
def test_a_thousand_prefills_leave_the_memory_as_ten_did_and_no_step_synchronises(logs: Path) -> None:
    outcome = run(faults.endurance, logs)
    assert outcome["passed"], outcome


@pytest.mark.full
def test_one_command_serves_and_is_idle_and_ends(logs: Path) -> None:
    outcome = run(clients.serving, logs)
    assert outcome["passed"], outcome
