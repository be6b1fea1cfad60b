# SPDX-License-Identifier: Apache-2.0
"""The deployment examples start a service whose endpoints, metrics, status and events are what operations.md says."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from afd_plugin.demo.client import Endpoint
from afd_plugin.observability.metrics import MEASURES
from afd_plugin.supervisor.ports import PortReservation
from afd_plugin.supervisor.processes import end_all, members_of
from tests.e2e.harness import environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

DEPLOY = Path(__file__).parents[2] / "deploy"
OPTIONS = "--max-model-len 512 --max-num-batched-tokens 64 --enforce-eager --served-model-name m"


def unit_command(role: str, variables: Mapping[str, str]) -> list[str]:
    """`ExecStart` of a unit, expanded as systemd does: `${X}` is one word, `$X` alone is split into words."""
    text = (DEPLOY / "systemd" / f"afd-{role}.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words: list[str] = []
    for word in line.split():
        if re.fullmatch(r"\$\w+", word):
            words += shlex.split(variables[word[1:]])
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], word))
    assert words[:2] == ["/usr/bin/env", "afd"]
    return words[2:]


def compose_command(role: str, variables: Mapping[str, str]) -> list[str]:
    """A service's command with the paths of its container put back to those of the host."""
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"][role]
    text = re.sub(
        r"\$\{(\w+)(?::-([^}]*))?\}", lambda match: variables.get(match[1], match[2]), service["command"]
    )
    words = shlex.split(text)
    paths = {"/run/secrets/token": variables["AFD_TOKEN_FILE"], "/model": variables["AFD_MODEL"]}
    assert words[0] == "afd"
    return [paths.get(word, word) for word in words[1:]]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  (addresses of the test itself)
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def await_that(condition: Callable[[], bool], complaint: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.1)


@contextmanager
def launched(
    python: Path, commands: Mapping[str, list[str]], folder: Path, temporary: Path
) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """The commands as a service manager would run them, one log each."""
    processes = {}
    with ExitStack() as stack:
        for role, words in commands.items():
            log = stack.enter_context((folder / f"{role}.log").open("wb"))
            processes[role] = subprocess.Popen(
                [str(python), "-m", "afd_plugin.cli", *words],
                env=environment({"PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield processes
        finally:
            end_all([process.pid for process in processes.values()], 5.0)
            for process in processes.values():
                process.wait(timeout=10)


def test_the_examples_start_a_service_that_shows_itself_as_documented(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with PortReservation() as rendezvous, PortReservation() as status, PortReservation() as http:
        variables = {
            "AFD_TOKEN_FILE": str(tmp_path / "token"),
            "AFD_RENDEZVOUS": f"127.0.0.1:{rendezvous.port}",
            "AFD_FFN_STATUS": f"127.0.0.1:{status.port}",
            "AFD_HTTP_HOST": "127.0.0.1",
            "AFD_HTTP_PORT": str(http.port),
            "AFD_MODEL": str(checkpoints["qwen3-moe"]),
            "AFD_VLLM_OPTIONS": OPTIONS,
        }
    (tmp_path / "token").write_text("a secret of the tests")
    example = (DEPLOY / "systemd" / "afd.env").read_text(encoding="utf-8")
    assert set(re.findall(r"^(\w+)=", example, re.MULTILINE)) == set(variables)
    commands = {role: unit_command(role, variables) for role in ("ffn", "attention")}
    assert commands == {role: compose_command(role, variables) for role in commands}

    attention, ffn = (f"http://127.0.0.1:{port}" for port in (http.port, status.port))
    with (
        tempfile.TemporaryDirectory(prefix="ops-") as temporary,
        launched(Path(sys.executable), commands, tmp_path, Path(temporary)) as processes,
    ):

        def answers(url: str) -> bool:
            for role, process in processes.items():
                assert process.poll() is None, (tmp_path / f"{role}.log").read_text()[-3000:]
            return get(f"{url}/health")[0] == 200

        await_that(lambda: answers(ffn), "the FFN's endpoint does not answer")
        assert get(f"{ffn}/ready")[0] == 503
        await_that(lambda: answers(attention), "attention does not answer")
        assert get(f"{ffn}/ready") == (200, "serving\n")
        generation, _ = Endpoint("127.0.0.1", http.port, "m").complete("Hello", 16)
        assert len(generation.token_ids) == 16

        def published() -> bool:
            return real_steps(get(f"{attention}/metrics")[1]) >= 16 <= real_steps(get(f"{ffn}/metrics")[1])

        await_that(published, f"no metrics: {get(f'{ffn}/metrics')[1][:2000]}", 20)
        text = get(f"{attention}/metrics")[1]
        assert "vllm:generation_tokens_total" in text
        sent = value(text, r"afd:bytes_total\{direction=\"sent\".*")
        assert sent == value(get(f"{ffn}/metrics")[1], r"afd:bytes_total\{direction=\"received\".*") > 0
        assert value(text, r"afd:peer_up\{.*") == 1
        exchange, waiting = (value(text, rf"afd:{name}_seconds_total\{{.*") for name in ("exchange", "wait"))
        assert exchange > waiting > 0

        shown = subprocess.run(
            [sys.executable, "-m", "afd_plugin.cli", "status", "--json"],
            env={**os.environ, "TMPDIR": temporary},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,  # 1 where another service of this user is not well
        )
        rows = {row["name"]: row for row in json.loads(shown.stdout) if row["url"] in (attention, ffn)}
        assert set(rows) == {"attention-0", "ffn-0"}
        assert all(row["well"] and row["phase"] == "serving" for row in rows.values())
        assert rows["attention-0"]["steps"] == rows["ffn-0"]["steps"] >= 16
        assert rows["ffn-0"]["url"] == ffn

        processes["attention"].send_signal(signal.SIGTERM)
        assert processes["attention"].wait(timeout=60) == 0
        assert processes["ffn"].wait(timeout=60) == 0
        assert members_of([process.pid for process in processes.values()]) == []
        assert list(Path(temporary).iterdir()) == []
    logs = [(tmp_path / f"{role}.log").read_text(encoding="utf-8") for role in commands]
    epochs = [re.findall(r"afd event=connected .*epoch=([0-9a-f]+)", log) for log in logs]
    assert epochs[0] == epochs[1]
    assert len(epochs[0]) == 1


def value(text: str, pattern: str) -> float:
    return sum(float(number) for number in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


def real_steps(text: str) -> float:
    return value(text, r"afd:steps_total\{kind=\"real\".*")


def test_the_dashboard_names_only_metrics_that_exist_and_all_of_them() -> None:
    dashboard = (DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8")
    json.loads(dashboard)
    named = set(re.findall(r"afd:[a-z_]+", dashboard))
    existing = {measure.name if measure.gauge else f"{measure.name}_total" for measure in MEASURES}
    assert named <= existing
    assert existing - named <= {"afd:messages_total"}
    page = (DEPLOY.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    assert {name for name in existing if f"`{name}" not in page} == set()
