# SPDX-License-Identifier: Apache-2.0
"""An FFN that dies and is started again costs time and nothing else: every answer is equal to the bit.

Deaths are planted inside the FFN at an exact exchange, so that each case of the protocol is met and not hoped for.
"""

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from afd_plugin.config import AFDConfig, Role
from afd_plugin.demo import client
from afd_plugin.demo.client import Endpoint
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.native import reference
from afd_plugin.demo.prompts import PROMPTS
from afd_plugin.demo.records import Generation
from afd_plugin.demo.service import HOST, Command, Service
from afd_plugin.supervisor.ports import PortReservation
from afd_plugin.topology import Topology
from tests.e2e.chaos import BOUND_S, LONG_PROMPT, Client, Deployment, Victim, strike, two_ports
from tests.e2e.dying import DEATHS, Death
from tests.e2e.harness import environment
from tests.e2e.services import afd_attention, flags, native_traces, running
from tests.e2e.teardown import nothing_left
from tests.e2e.test_topologies import TOKENS, lane, options

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MODEL = "deepseek-v2"
ENGINE = EngineArguments()
WINDOW_S = 240.0
UNITS = 3
"""Exchanges of a step of this model."""


def dying_serve(python: Path | str, extra: Sequence[str] = ()) -> Command:
    """`afd serve` with an FFN that dies on order."""

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        words = ["--host", HOST, "--port", str(port), "--ffn-restart-window", str(WINDOW_S), *extra]
        vllm = ["--served-model-name", name, *flags(engine)]
        return [str(python), "-m", "tests.e2e.dying", "serve", *words, str(model), *vllm]

    return command


def dying_ffn(python: Path | str) -> Command:
    """An FFN without a launcher, which dies on order."""
    content = json.dumps(AFDConfig(Role.FFN).to_additional_config())

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        return [str(python), "-m", "tests.e2e.dying", "ffn", content, str(model), *flags(engine)]

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
    """How often the log says so; the counter is in the role reports, which come at the end."""
    return service.log.read_text(encoding="utf-8", errors="replace").count("connected to the FFN again")


def await_reconnects(service: Service, expected: int) -> None:
    deadline = time.monotonic() + 60
    while reconnects(service) != expected:
        assert time.monotonic() < deadline, f"{reconnects(service)} reconnects; {service.tail()}"
        time.sleep(0.2)


def await_published(deployment: Deployment, expected: int) -> None:
    """vLLM's own `/metrics` counts the reconnects, within seconds; a fork of the zygote would publish nothing."""
    deadline = time.monotonic() + 10
    found: list[float] = []
    while sum(found) != expected:
        assert time.monotonic() < deadline, f"published reconnects: {found}"
        time.sleep(0.2)
        with urllib.request.urlopen(f"http://127.0.0.1:{deployment.http}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = [float(one) for one in re.findall(r"^afd:reconnects_total\{.*\} (\S+)$", text, re.MULTILINE)]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes as long as the starts that it waits for."""
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_S", 2 * WINDOW_S)


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


@pytest.mark.full
def test_2a2f_tensor_parallel_ranks_of_both_roles_wait_for_their_leaders(
    checkpoints: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    topology = Topology(attention_tp=2, ffn_tp=2)
    engine = EngineArguments(tensor_parallel_size=2)
    native = list(reference(checkpoints[MODEL], engine, python=python).generations)
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    command = dying_serve(python, options(topology))
    with running(command, checkpoints[MODEL], ENGINE, tmp_path / "afd", **{DEATHS: str(deaths)}) as service:
        for number, death in enumerate(
            [
                Death(unit=1, least=2),  # either rank of the FFN dies, in a prefill
                Death(unit=2, most=1),  # in decode
                Death(unit=1, most=1, moment="answering"),  # the leader, when attention has the answer
            ]
        ):
            order = death.order(deaths, str(number))
            ask(service.endpoint, number, native)
            carried_out([order])
    reports = service.role_reports()
    assert [reports[f"attention-0-{rank}"]["reconnects"] for rank in range(2)] == [3, 0], "the leader alone"
    print(times(service))


@contextmanager
def by_hand(
    python: Path, checkpoints: dict[str, Path], folder: Path, window_s: float
) -> Iterator[tuple[Service, Callable[[str], Service]]]:
    """`afd attention` with a window, its first FFN, and what starts another one of a model in its place."""
    deaths = folder / "deaths"
    deaths.mkdir(parents=True)
    with PortReservation() as port:
        address = f"127.0.0.1:{port.port}"
    # An FFN without a launcher that kills itself leaves vLLM's rendezvous file: no promise of ours is broken by it.
    with native_traces() as traces, ExitStack() as stack:
        env = environment(
            {**traces.environment, DEATHS: str(deaths), "AFD_TOKEN": "t", "AFD_LISTEN": address}
        )

        def start(model: str) -> Service:
            name = f"ffn-{len(list(folder.glob('ffn-*')))}"
            one = Service(dying_ffn(python), checkpoints[model], "m", ENGINE, folder / name, env)
            return stack.enter_context(one)

        start(MODEL)
        extra = ["--peer", address, "--ffn-restart-window", str(window_s)]
        service = stack.enter_context(
            Service(afd_attention(python, extra), checkpoints[MODEL], "m", ENGINE, folder / "attention", env)
        )
        service.await_ready()
        traces.note()
        yield service, start


def await_death(order: Path) -> None:
    deadline = time.monotonic() + 60
    while order.exists():
        assert time.monotonic() < deadline, "the FFN did not die"
        time.sleep(0.05)


def exit_code(service: Service, within_s: float) -> int:
    """How it ended, by itself."""
    return service._process.wait(timeout=within_s)


def test_a_successor_that_anybody_starts_is_taken_and_one_with_another_model_refused(
    checkpoints: dict[str, Path], python: Path, native: list[Generation], tmp_path: Path
) -> None:
    with by_hand(python, checkpoints, tmp_path, WINDOW_S) as (service, start), ThreadPoolExecutor(1) as pool:
        order = Death(unit=2).order(tmp_path / "deaths", "a")
        answer = pool.submit(ask, service.endpoint, 0, native)
        await_death(order)
        start(MODEL)
        answer.result(2 * WINDOW_S)
        order = Death(unit=0).order(tmp_path / "deaths", "b")
        failing = pool.submit(service.endpoint.complete, PROMPTS[1], TOKENS)
        await_death(order)
        stranger = start("deepseek-v3")
        with pytest.raises(client.RequestError):
            failing.result(2 * WINDOW_S)
        assert exit_code(stranger, 60) != 0
        assert "fingerprint-mismatch" in stranger.log.read_text(encoding="utf-8")
        assert exit_code(service, 60) == 2
        assert "fingerprint-mismatch" in last_line(service)


def test_when_nobody_comes_back_within_the_window_it_is_the_failure_that_it_was(
    checkpoints: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    window_s = 3.0
    with by_hand(python, checkpoints, tmp_path, window_s) as (service, _), ThreadPoolExecutor(1) as pool:
        order = Death(unit=1).order(tmp_path / "deaths", "a")
        failing = pool.submit(service.endpoint.complete, PROMPTS[0], TOKENS)
        await_death(order)
        died = time.monotonic()
        with pytest.raises(client.RequestError):
            failing.result(60)
        took = time.monotonic() - died
        print(f"restart: an error {took:.1f} s after the death, window {window_s:g} s")
        assert window_s - 1 <= took <= window_s + BOUND_S
        assert exit_code(service, BOUND_S) == 3
        assert "peer-lost" in last_line(service)
        assert f"No FFN came back within {window_s:g} s" in last_line(service)


@pytest.mark.full
def test_attention_that_dies_while_its_ffn_is_down_ends_the_service(
    checkpoints: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    with nothing_left() as traces:
        env = environment({**traces.environment, DEATHS: str(deaths)})
        with Service(dying_serve(python), checkpoints[MODEL], "m", ENGINE, tmp_path / "afd", env) as service:
            service.await_ready()
            await_death(Death(moment="now").order(deaths, "a"))
            (worker,) = set(
                re.findall(r"^\[attention-0\] \(Worker pid=(\d+)\)", service.log.read_text(), re.MULTILINE)
            )
            os.kill(int(worker), signal.SIGKILL)
            assert exit_code(service, 3 * BOUND_S) != 0


@pytest.mark.full
@pytest.mark.parametrize("moment", ["prefill", "decode", "idle"])
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (Victim.FFN_WORKER, signal.SIGKILL),
        (Victim.FFN_WORKER, signal.SIGSTOP),
        (Victim.FFN_HOST, signal.SIGKILL),
    ],
    ids=["worker-killed", "worker-stopped", "host-killed"],
)
def test_real_processes_struck_from_outside_come_back(
    checkpoints: dict[str, Path], tmp_path: Path, victim: Victim, number: signal.Signals, moment: str
) -> None:
    extra = ["--ffn-restart-window", str(WINDOW_S)]
    with Deployment(checkpoints[MODEL], tmp_path, two_ports(), together=True, options=extra) as deployment:
        deployment.await_ready()
        quiet = Client(deployment.http, "Hi", 300, patience_s=2 * WINDOW_S).result()
        prompt = LONG_PROMPT if moment == "prefill" else "Hi"
        process = deployment.find(victim)
        if moment == "idle":
            strike(process, number)
        struck = Client(deployment.http, prompt, 300, patience_s=2 * WINDOW_S)
        if moment == "decode":
            assert struck.started.wait(30), "no token came"
        if moment != "idle":
            strike(process, number)
        answer = struck.result()
        await_published(deployment, 1)
        assert (quiet.ended, answer.ended, answer.tokens) == ("complete", "complete", 300), deployment.tails()
        assert deployment.attention.process.poll() is None
        deployment.attention.process.send_signal(signal.SIGTERM)
        assert deployment.attention.process.wait(timeout=60) == 0, deployment.tails()
        log = deployment.attention.log.read_text(encoding="utf-8")
        assert "ffn-0 serves again" in log
        assert deployment.family() == []


def last_line(service: Service) -> str:
    """What a person reads last."""
    return service.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]


def times(service: Service) -> str:
    """What the supervisor said about each return."""
    lines = service.log.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if "serves again" in line)
