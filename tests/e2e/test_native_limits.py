# SPDX-License-Identifier: Apache-2.0
"""What native vLLM 0.28.0 itself cannot do on a CPU, and therefore cannot be compared with or offered there.

Each case runs the native command that a refusal or a missing reference rests on. One that begins to work calls for
another look at `Topology.ffn_world`, `expert-parallel-on-cpu` and the references of `test_topologies.py`.
"""

from pathlib import Path

import pytest

from afd_plugin.demo.client import RequestError
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.service import Service, ServiceError
from tests.e2e.harness import environment
from tests.e2e.services import native_traces, vllm_serve

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(300)]


def failing_log(options: list[str], model: Path, python: Path, folder: Path) -> str:
    """The log of `vllm serve MODEL OPTIONS`, which must fail at the latest when it is asked something."""
    with (
        native_traces() as traces,
        Service(
            vllm_serve(python, options),
            model,
            "m",
            EngineArguments(),
            folder,
            environment(traces.environment),
        ) as service,
    ):

        def ask() -> None:
            service.await_ready()
            service.endpoint.complete("Hi")

        with pytest.raises((ServiceError, RequestError)):
            ask()
        return service.log.read_text(encoding="utf-8", errors="replace")


def test_data_parallelism_of_an_moe_model_fails_for_want_of_an_all_gather(
    checkpoints: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    log = failing_log(["--data-parallel-size", "2"], checkpoints["deepseek-v2"], python, tmp_path / "dp2")
    assert "all_gatherv" in log
    assert "NotImplementedError" in log


def test_expert_parallelism_ends_the_workers(
    checkpoints: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    options = ["--tensor-parallel-size", "2", "--enable-expert-parallel"]
    log = failing_log(options, checkpoints["deepseek-v2"], python, tmp_path / "ep2")
    assert "died unexpectedly" in log
    # what vLLM logs is None where it looks before the process has been waited for
    assert "(exit code: -11)" in log or "Segfault encountered" in log
