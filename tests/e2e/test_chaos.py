# SPDX-License-Identifier: Apache-2.0
"""Whatever dies or stops, whenever: the client has an error within the bound, nothing is left, the next start works.

The full matrix (marker `full`) strikes each process of each role with three signals at six moments; a few telling
cases stand for it by default. All cases of a session use the same two ports, so each one's start shows that the
one before left them free.
"""

import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import zmq

from afd_plugin.cli.launch import VLLM_BEHIND_S
from afd_plugin.config import AFDConfig, LinkSettings, Role
from afd_plugin.control import AttentionControl, Fingerprint
from afd_plugin.control.address import Address
from afd_plugin.control.sockets import dial
from afd_plugin.errors import AFDError, DrainTimeout
from afd_plugin.topology import Topology
from tests.e2e.chaos import (
    BOUND_S,
    DECODE_TOKENS,
    LONG_PROMPT,
    Aftermath,
    Client,
    Deployment,
    Victim,
    strike,
    two_ports,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

MODEL = "qwen3-moe"
START_S = 16.0
"""Roughly what a start takes; the moments of the start-up cases are parts of it."""

MOMENTS = ("start-25", "start-50", "start-75", "idle", "prefill", "decode")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
GOOD_ORDER_S = 120.0
"""After SIGTERM requests may finish, which takes a slow host 50 seconds: then a clean stop has its own bound."""


@pytest.fixture(scope="session")
def ports() -> tuple[int, int]:
    return two_ports()


def meet(deployment: Deployment, moment: str) -> Sequence[Client]:
    """Bring the service to `moment`; the clients that are then in flight."""
    if moment.startswith("start-"):
        deployment.pause_until(START_S * int(moment.removeprefix("start-")) / 100)
        return ()
    deployment.await_ready()
    if moment == "decode":
        client = Client(deployment.http, "Hi", DECODE_TOKENS)
        assert client.started.wait(30), "no token came"
        return (client,)
    if moment == "prefill":
        clients = [Client(deployment.http, LONG_PROMPT, DECODE_TOKENS) for _ in range(3)]
        deployment.pause_until(time.monotonic() - deployment.began + 0.5)
        assert not any(client.started.is_set() for client in clients), "the prefill is over already"
        return clients
    return ()


def suffer(deployment: Deployment, victim: Victim, number: signal.Signals, moment: str) -> Aftermath:
    """The fault and what follows from it."""
    starting = moment.startswith("start-")
    if not starting:
        deployment.await_ready()
        process = deployment.find(victim)
    clients = list(meet(deployment, moment))
    if starting:
        process = deployment.find(victim)
    at = strike(process, number)
    if moment == "idle":
        clients.append(Client(deployment.http, "Hi", DECODE_TOKENS))
    bound = 2 * BOUND_S if number is not signal.SIGTERM else GOOD_ORDER_S
    seen = deployment.watch(at, clients, bound)
    print(f"chaos: {victim.value} {number.name} {moment}: {seen.row()}")
    return seen


def check(seen: Aftermath, deployment: Deployment, number: signal.Signals) -> None:
    """What every case promises."""
    context = f"{seen.row()}\n{deployment.tails()}"
    for answer in seen.answers:
        allowed = {"error", "reset"} | ({"complete"} if number is signal.SIGTERM else set())
        assert answer.ended in allowed, f"{answer}\n{context}"
    orderly = number is signal.SIGTERM
    assert orderly or seen.answered_after <= BOUND_S, context
    assert not seen.left, f"left behind: {seen.left}\n{context}"
    assert orderly or seen.gone_after <= BOUND_S + 1.0, context
    assert not seen.files, f"temporary files: {seen.files}\n{context}"
    if not orderly:
        assert any(seen.exit_codes), context
        blamed = [
            line
            for line, code in zip(seen.last_lines, seen.exit_codes, strict=True)
            if code and line.startswith("afd: ")
        ]
        assert blamed, f"no last line names a cause: {seen.last_lines}\n{context}"


def strike_and_check(
    model: Path,
    folder: Path,
    ports: tuple[int, int],
    victim: Victim,
    number: signal.Signals,
    moment: str,
) -> None:
    with Deployment(model, folder, ports, together=moment.startswith("start-")) as deployment:
        seen = suffer(deployment, victim, number, moment)
        check(seen, deployment, number)


@pytest.mark.parametrize(
    ("victim", "number"),
    [(Victim.ATTENTION_WORKER, signal.SIGKILL), (Victim.FFN_WORKER, signal.SIGSTOP)],
    ids=str,
)
def test_a_fault_in_decode_is_an_error_within_the_bound_and_leaves_nothing(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    ports: tuple[int, int],
    victim: Victim,
    number: signal.Signals,
) -> None:
    strike_and_check(checkpoints[MODEL], tmp_path, ports, victim, number, "decode")


MATRIX = [
    pytest.param(victim, number, moment, id=f"{victim.value}-{number.name}-{moment}")
    for victim in Victim
    for number in SIGNALS
    for moment in MOMENTS
    if not (
        victim is Victim.FFN_LAUNCHER and moment.startswith("start-")
    )  # there one launcher starts both roles
]


@pytest.mark.full
@pytest.mark.parametrize(("victim", "number", "moment"), MATRIX)
def test_every_fault_at_every_moment_is_an_error_within_the_bound_and_leaves_nothing(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    ports: tuple[int, int],
    victim: Victim,
    number: signal.Signals,
    moment: str,
) -> None:
    strike_and_check(checkpoints[MODEL], tmp_path, ports, victim, number, moment)


DRAIN_S = 2.0


@pytest.mark.parametrize(
    ("victim", "bound_s"),
    [
        (Victim.ATTENTION_LAUNCHER, DRAIN_S + BOUND_S),
        # struck past its launcher: vLLM drains by itself, kills its engine and waits for clients that wait for it
        pytest.param(Victim.HTTP, DRAIN_S + VLLM_BEHIND_S + 1.5 * BOUND_S, marks=pytest.mark.full),
    ],
    ids=lambda value: value.value if isinstance(value, Victim) else "",
)
def test_requests_that_outlast_the_drain_of_a_stop_end_with_an_error(
    checkpoints: dict[str, Path], tmp_path: Path, ports: tuple[int, int], victim: Victim, bound_s: float
) -> None:
    options = ("--drain-timeout", f"{DRAIN_S:g}")
    with Deployment(checkpoints[MODEL], tmp_path, ports, together=True, options=options) as deployment:
        deployment.await_ready()
        process = deployment.find(victim)
        clients = [Client(deployment.http, "Hi", 4000, patience_s=2 * bound_s) for _ in range(2)]
        assert all(client.started.wait(30) for client in clients), "no token came"
        seen = deployment.watch(strike(process, signal.SIGTERM), clients, 2 * bound_s)
        print(f"chaos: drain of {victim.value}: {seen.row()}")
        context = f"{seen.row()}\n{deployment.tails()}"
        assert {answer.ended for answer in seen.answers} <= {"error", "reset"}, context
        assert seen.answered_after <= bound_s, context
        assert seen.exit_codes[0] == 1, context
        assert seen.last_lines[0].startswith("afd: "), context
        if victim is Victim.ATTENTION_LAUNCHER:
            assert DrainTimeout.name in seen.last_lines[0], context
        assert seen.left == []


def test_intruders_change_nothing_and_then_a_killed_ffn_worker_is_named_by_both_launchers(
    checkpoints: dict[str, Path], tmp_path: Path, ports: tuple[int, int]
) -> None:
    with Deployment(checkpoints[MODEL], tmp_path, ports) as deployment:
        deployment.await_ready()
        before = Client(deployment.http, "A mixture of experts is", 20).result()
        assert before.ended == "complete"
        client = Client(deployment.http, "Hi", 600)
        assert client.started.wait(30)
        garbage(deployment.rendezvous)
        with pytest.raises(AFDError) as wrong_token:
            knock(deployment.rendezvous, token="another")
        assert wrong_token.value.name == "token-rejected"
        with pytest.raises(AFDError) as stranger:
            knock(deployment.rendezvous, token="chaos")
        assert stranger.value.name == "fingerprint-mismatch"
        oversized(deployment.rendezvous, token="chaos")
        answer = client.result()
        assert (answer.ended, answer.tokens) == ("complete", 600), deployment.tails()
        worker = deployment.find(Victim.FFN_WORKER)
        seen = suffer(deployment, Victim.FFN_WORKER, signal.SIGKILL, "decode")
        check(seen, deployment, signal.SIGKILL)
        assert seen.exit_codes == (3, 1)
        assert str(worker.pid) in seen.last_lines[0], seen.last_lines
        assert "died" in seen.last_lines[1], seen.last_lines


def garbage(port: int) -> None:
    """Bytes of no meaning, with and without a greeting, on the control port."""
    generator = random.Random(3)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
    for number in range(40):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            try:
                connection.sendall((greeting if number % 2 else b"") + generator.randbytes(5000))
            except OSError:
                continue  # cut off while still sending: as wished


def knock(port: int, token: str) -> None:
    """Ask to be admitted as attention lane 0 of another model."""
    settings = LinkSettings(peer=f"127.0.0.1:{port}", token=token, rendezvous_timeout_s=10)
    other = Fingerprint(
        plugin_version="0",
        vllm_version="0",
        model_config_hash="0",
        dtype="torch.bfloat16",
        hidden_size=1,
        units=(),
        max_tokens=1,
    )
    control = AttentionControl()
    try:
        control.connect(settings, Topology(), 0, other)
    finally:
        control.close()


def oversized(port: int, token: str) -> None:
    """A frame far above the bound, from somebody who holds the token."""
    with zmq.Context() as context:
        channel = dial(context, Address("127.0.0.1", port), token)
        assert channel.socket.poll(5000, zmq.POLLOUT)
        channel.socket.send(b"\0" * (1 << 24))
        assert channel.events.poll(5000)
        channel.close()


@pytest.mark.parametrize("layer", [0, pytest.param(2, marks=pytest.mark.full)])
def test_an_exception_in_the_ffn_reaches_the_client_as_an_error_and_the_log_with_its_traceback(
    checkpoints: dict[str, Path], tmp_path: Path, ports: tuple[int, int], layer: int
) -> None:
    trigger = tmp_path / "trigger"
    config = AFDConfig(Role.FFN)
    command = planted_ffn(checkpoints[MODEL], config)
    environment = {
        "AFD_E2E_FAIL_WHEN": str(trigger),
        "AFD_E2E_FAIL_AT": str(layer),
        "AFD_LISTEN": f"127.0.0.1:{ports[0]}",
    }
    with Deployment(checkpoints[MODEL], tmp_path, ports, command, **environment) as deployment:
        (client,) = meet(deployment, "decode")
        trigger.touch()
        seen = deployment.watch(time.monotonic(), [client], 2 * BOUND_S)
        check(seen, deployment, signal.SIGKILL)
        attention = deployment.attention.log.read_text(encoding="utf-8")
        assert f"planted at unit {layer}" in seen.last_lines[0]
        assert "tests/e2e/planted.py" in attention  # the remote traceback's last lines
        assert seen.exit_codes == (3, 1)


def test_an_exception_in_attention_between_steps_is_named_by_both_launchers(
    checkpoints: dict[str, Path], tmp_path: Path, ports: tuple[int, int]
) -> None:
    seen = attention_raises(
        checkpoints[MODEL], tmp_path, ports, "--logits-processors=tests.e2e.raising:RaisingProcessor"
    )
    assert seen.exit_codes == (1, 3)
    assert all("planted in sampling" in line for line in seen.last_lines), seen.last_lines


@pytest.mark.full
def test_an_exception_in_the_engine_core_is_no_clean_end(
    checkpoints: dict[str, Path], tmp_path: Path, ports: tuple[int, int]
) -> None:
    option = "--scheduler-cls=tests.e2e.raising.RaisingScheduler"
    seen = attention_raises(checkpoints[MODEL], tmp_path, ports, option, together=True)
    assert seen.exit_codes[0] == 1
    assert "engine-failed" in seen.last_lines[0]


def attention_raises(
    model: Path, folder: Path, ports: tuple[int, int], option: str, together: bool = False
) -> Aftermath:
    trigger = folder / "trigger"
    planted = {"AFD_E2E_FAIL_WHEN": str(trigger)}
    with Deployment(
        model, folder, ports, together=together, engine_options=(option,), **planted
    ) as deployment:
        deployment.await_ready()
        (client,) = meet(deployment, "decode")
        trigger.touch()
        seen = deployment.watch(time.monotonic(), [client], 2 * BOUND_S)
        check(seen, deployment, signal.SIGKILL)
    return seen


def planted_ffn(model: Path, config: AFDConfig) -> list[str]:
    import json
    import sys

    from tests.e2e.chaos import ENGINE
    from tests.e2e.services import flags

    content = json.dumps(config.to_additional_config())
    return [sys.executable, "-m", "tests.e2e.planted", content, str(model), *flags(ENGINE)]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_lives_of_a_service_leave_no_process_port_or_file(
    checkpoints: dict[str, Path], tmp_path: Path, ports: tuple[int, int]
) -> None:
    for number in range(20):
        with Deployment(checkpoints[MODEL], tmp_path / str(number), ports) as deployment:
            deployment.await_ready()
            assert Client(deployment.http, "Hi", 8).result().ended == "complete"
            assert deployment.stop() == (0, 0), deployment.tails()
            assert deployment.family() == []
            assert deployment.remains() == []
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_an_idle_service_costs_no_processor_and_answers_afterwards(
    checkpoints: dict[str, Path], tmp_path: Path, ports: tuple[int, int]
) -> None:
    idle_s = float(os.environ.get("AFD_E2E_IDLE_S", "1800"))
    with Deployment(checkpoints[MODEL], tmp_path, ports) as deployment:
        deployment.await_ready()
        first = Client(deployment.http, "Hi", 20).result()
        ffn = [deployment.find(victim) for victim in (Victim.FFN_HOST, Victim.FFN_WORKER)]
        attention = [deployment.find(victim) for victim in (Victim.ENGINE_CORE, Victim.ATTENTION_WORKER)]
        before = {process.pid: used(process) for process in (*ffn, *attention)}
        began = time.monotonic()
        deployment.pause_until(began - deployment.began + idle_s)
        spent = {process.pid: used(process) - before[process.pid] for process in (*ffn, *attention)}
        elapsed = time.monotonic() - began
        assert sum(spent[process.pid] for process in ffn) <= 0.02 * elapsed, spent
        print(f"idle {elapsed:.0f} s: processor seconds by process {spent}")
        again = Client(deployment.http, "Hi", 20).result()
        assert (first.ended, again.ended, again.tokens) == ("complete", "complete", 20)
        assert deployment.stop() == (0, 0)


def used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
