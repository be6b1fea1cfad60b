# SPDX-License-Identifier: Apache-2.0
"""Whole services over HTTP: `afd serve` is native to the bit, alone and under load, and ends cleanly."""

import json
from itertools import product
from pathlib import Path

import pytest

from afd_plugin.config import AFDConfig, LinkSettings, Role
from afd_plugin.demo import parity
from afd_plugin.demo.client import record
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.native import reference
from afd_plugin.demo.records import Record
from afd_plugin.demo.service import Service
from afd_plugin.supervisor.ports import PortReservation
from tests.e2e.harness import STEP_RECORDERS, environment
from tests.e2e.recorders import LOG_VARIABLE
from tests.e2e.services import afd_serve, ffn_only, running, together, vllm_serve
from tests.e2e.test_modes import read_steps

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

ENGINE = EngineArguments()
ROUNDS = 3

Round = tuple[list[list[int]], Record]
"""The tokens of every step in order, and the answers."""


def test_one_command_serves_native_answers_and_stops_cleanly_with_the_real_interpreter(
    checkpoints: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    native = reference(checkpoints["qwen3-moe"], ENGINE, python=python)
    with running(afd_serve(), checkpoints["qwen3-moe"], ENGINE, tmp_path / "afd") as service:
        found = parity.compare(native, record(service.endpoint))
    assert (found.requests, found.equal_token_lists) == (8, 8)
    assert found.bitwise_equal == found.logprob_entries == 8 * 32 * 3
    log = (tmp_path / "afd" / "server.log").read_text(encoding="utf-8")
    assert "[attention-0]" in log
    assert "[ffn-0]" in log
    assert "SIGKILL" not in log


def test_under_load_answers_are_native_where_the_batches_are_and_within_natives_own_spread_elsewhere(
    checkpoints: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    model = checkpoints["deepseek-v2"]
    native_log, afd_log = tmp_path / "native.steps", tmp_path / "afd.steps"
    native_command = vllm_serve(python, ["--worker-cls", STEP_RECORDERS[None]])
    with running(
        native_command, model, ENGINE, tmp_path / "native", native=True, **{LOG_VARIABLE: str(native_log)}
    ) as service:
        native = rounds(service, native_log)
    with PortReservation() as port:
        link = LinkSettings(
            listen=f"127.0.0.1:{port.port}", peer=f"127.0.0.1:{port.port}", token="t"
        ).to_env()
        additional = {"afd": AFDConfig(Role.ATTENTION).to_additional_config()}
        options = [
            "--worker-cls",
            STEP_RECORDERS[Role.ATTENTION],
            "--additional-config",
            json.dumps(additional),
        ]
        attention = vllm_serve(python, [*options, "--shutdown-timeout", "30"])
        ffn = Service(ffn_only(python), model, "m", ENGINE, tmp_path / "ffn", environment(link))
        with (
            ffn,
            running(
                attention, model, ENGINE, tmp_path / "afd", **link, **{LOG_VARIABLE: str(afd_log)}
            ) as service,
        ):
            disaggregated = rounds(service, afd_log)
        assert ffn.stop() == 0

    alone = reference(model, ENGINE, python=python)
    answers = [alone, *(round_answers for _, round_answers in native)]
    spread = max(parity.compare(left, right).max_abs_dlogprob for left, right in product(answers, answers))
    for (steps, ours), (native_steps, theirs) in product(disaggregated, native):
        found = parity.compare(theirs, ours)
        if steps == native_steps:
            assert found.exact
        else:
            assert found.max_abs_dlogprob <= spread


def rounds(service: Service, log: Path) -> list[Round]:
    """Send all prompts at once, several times; each round with its own part of the step log."""
    found: list[Round] = []
    for _ in range(ROUNDS):
        before = len(read_steps(log)) if log.exists() else 0
        answers = together(service.endpoint)
        steps = [sorted(step["tokens"]) for step in read_steps(log)[before:]]
        found.append((steps, answers))
    return found
