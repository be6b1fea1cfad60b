# SPDX-License-Identifier: Apache-2.0
"""An FFN that dies and is started again costs time and nothing else: every answer is equal to the bit.

Deaths are planted inside the FFN at an exact exchange, so that each case of the protocol is met and not hoped for.
"""

import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from afd_plugin.demo import client
from afd_plugin.demo.client import Endpoint
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.native import reference
from afd_plugin.demo.prompts import PROMPTS
from afd_plugin.demo.records import Generation
from afd_plugin.demo.service import HOST, Command, Service
from afd_plugin.topology import Topology
from tests.e2e.dying import DEATHS, Death
from tests.e2e.services import flags, running
from tests.e2e.test_topologies import TOKENS, lane, options

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

MODEL = "deepseek-v2"
ENGINE = EngineArguments()
WINDOW_S = 90.0
UNITS = 3
"""Exchanges of a step of this model."""


def dying_serve(python: Path | str, extra: Sequence[str] = ()) -> Command:
    """`afd serve` with an FFN that dies on order."""

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        words = ["--host", HOST, "--port", str(port), "--ffn-restart-window", str(WINDOW_S), *extra]
        vllm = ["--served-model-name", name, *flags(engine)]
        return [str(python), "-m", "tests.e2e.dying", "serve", *words, str(model), *vllm]

    return command


@pytest.fixture(scope="module")
def native(checkpoints: dict[str, Path], python: Path) -> list[Generation]:
    return list(reference(checkpoints[MODEL], ENGINE, python=python).generations)


def ask(endpoint: Endpoint, number: int, native: Sequence[Generation]) -> None:
    """The answer to a prompt is native's to the bit."""
    answer, seconds = endpoint.complete(PROMPTS[number], TOKENS)
    expected = native[number]
    assert answer.token_ids == expected.token_ids[:TOKENS]
    assert answer.top_logprobs == expected.top_logprobs[:TOKENS]
    print(f"restart: prompt {number} answered after {seconds:.1f} s")


def carried_out(orders: Sequence[Path]) -> None:
    assert not [path.name for path in orders if path.exists()], "a death did not happen"


def reconnects(service: Service) -> int:
    """The sum of the attention workers' counters, once they have been published."""
    url = f"http://{service.endpoint.host}:{service.endpoint.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return sum(int(float(value)) for value in re.findall(r"^afd:reconnects_total\{.*\} (\S+)$", text, re.M))


def await_reconnects(service: Service, expected: int) -> None:
    deadline = time.monotonic() + 60
    while reconnects(service) != expected:
        assert time.monotonic() < deadline, f"{reconnects(service)} reconnects; {service.tail()}"
        time.sleep(0.2)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes as long as the starts that it waits for."""
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_S", 3 * WINDOW_S)


def test_1a1f_requests_outlive_deaths_of_the_ffn_twice_in_a_prefill_and_idle(
    checkpoints: dict[str, Path], python: Path, native: list[Generation], tmp_path: Path
) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    command = dying_serve(python)
    with running(command, checkpoints[MODEL], ENGINE, tmp_path / "afd", **{DEATHS: str(deaths)}) as service:
        twice = [Death(unit=1, least=2).order(deaths, "a"), Death(unit=2, least=2).order(deaths, "b")]
        ask(service.endpoint, 0, native)
        carried_out(twice)
        idle = Death(moment="now").order(deaths, "c")
        await_reconnects(service, 3)
        carried_out([idle])
        ask(service.endpoint, 1, native)
    reports = service.role_reports()
    assert reports["attention-0-0"]["reconnects"] == 3
    print(times(service))


def test_2a1f_both_lanes_resume_wherever_each_of_them_was(
    checkpoints: dict[str, Path], python: Path, native: list[Generation], tmp_path: Path
) -> None:
    topology = Topology(attention_dp=2)
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    command = dying_serve(python, options(topology))
    with running(command, checkpoints[MODEL], ENGINE, tmp_path / "afd", **{DEATHS: str(deaths)}) as service:
        for number, death in enumerate(
            [
                Death(unit=1, most=2),  # in decode; neither lane has its answer
                Death(unit=1, moment="answering"),  # one lane has, and sends its rows again
                Death(unit=UNITS - 1, moment="answering"),  # one lane has even finished the step
            ]
        ):
            order = death.order(deaths, str(number))
            # The request is on the lane that is answered last in the second case, first in the third.
            ask(lane(service.endpoint, topology, number), number, native)
            carried_out([order])
    reports = service.role_reports()
    assert [reports[f"attention-{one}-0"]["reconnects"] for one in range(2)] == [3, 3]
    assert service.log.read_text(encoding="utf-8").count("send the last rows again") == 2
    print(times(service))


def times(service: Service) -> str:
    """What the supervisor said about each return."""
    lines = service.log.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if "serves again" in line)
