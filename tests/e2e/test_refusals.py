# SPDX-License-Identifier: Apache-2.0
"""Roles that do not fit, or do not meet, end with one sentence and a telling exit code, and leave nothing."""

import json
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from afd_plugin.demo.engine import EngineArguments
from afd_plugin.supervisor.ports import PortReservation
from tests.e2e.harness import environment
from tests.e2e.services import flags
from tests.e2e.teardown import nothing_left

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

ENGINE = flags(EngineArguments())
REFUSED, NOT_MET = 2, 4


@dataclass(frozen=True)
class Ended:
    """How an `afd` command ended."""

    status: int
    error: str
    log: str


def run_roles(
    python: Path, folder: Path, commands: dict[str, list[str]], timeout_s: float = 150.0
) -> dict[str, Ended]:
    """Run several `afd` commands side by side to their ends; nothing of them may be left."""
    processes: dict[str, subprocess.Popen[str]] = {}
    ended: dict[str, Ended] = {}
    with nothing_left(folder) as traces:
        env = environment({**traces.environment, "AFD_TOKEN": "t"})
        try:
            for name, words in commands.items():
                with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
                    processes[name] = subprocess.Popen(
                        [str(python), "-m", "afd_plugin.cli", *words],
                        env=env,
                        stdout=log,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
            for name, process in processes.items():
                _, error = process.communicate(timeout=timeout_s)
                log_text = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                ended[name] = Ended(process.returncode, error, log_text)
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
    return ended


def verdict(ended: Ended) -> str:
    """The last sentence on standard error, which is what a person reads first."""
    lines = [line for line in ended.error.splitlines() if line.startswith("afd: ")]
    assert lines, ended.error + ended.log[-3000:]
    return ended.error[ended.error.index(lines[-1]) :]


@pytest.mark.parametrize(
    ("ffn", "attention", "told"),
    [
        (["MODEL:deepseek-v2"], ["MODEL:deepseek-v3"], "model_config_hash"),
        (["MODEL:deepseek-v2"], ["MODEL:deepseek-v2", "--dtype", "float16"], "dtype"),
        (["MODEL:qwen3-moe"], ["--gate", "attention", "MODEL:qwen3-moe"], "gate"),
        (["MODEL:qwen3-moe"], ["MODEL:qwen3-moe", "--max-num-batched-tokens", "128"], "max_tokens"),
    ],
    ids=["model", "dtype", "gate", "batch-limit"],
)
def test_roles_started_differently_are_both_refused_with_the_field_and_both_values(
    ffn: list[str],
    attention: list[str],
    told: str,
    python: Path,
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    with PortReservation() as port:
        address = f"127.0.0.1:{port.port}"
        ended = run_roles(
            python,
            tmp_path,
            {
                "ffn": ["ffn", "--listen", address, *words(ffn, checkpoints)],
                "attention": ["attention", "--peer", address, "--port", "0", *words(attention, checkpoints)],
            },
        )
    for role in ("ffn", "attention"):
        assert ended[role].status == REFUSED, verdict(ended[role])
        assert f"{told}: " in verdict(ended[role])


def words(given: list[str], checkpoints: dict[str, Path]) -> list[str]:
    """`given` with the model's folder in place of its name, and the engine's options where it leaves them open."""
    model = next(word for word in given if word.startswith("MODEL:"))
    position = given.index(model)
    before, after = given[:position], given[position + 1 :]
    defaults = list(ENGINE)
    for option in after:
        if option in defaults:
            start = defaults.index(option)
            del defaults[start : start + 2]
    return [*before, str(checkpoints[model.removeprefix("MODEL:")]), *defaults, *after]


@pytest.mark.parametrize("role", ["ffn", "attention"])
def test_a_role_alone_says_who_is_missing_and_where_it_waited(
    role: str, python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with PortReservation() as port:
        address = f"127.0.0.1:{port.port}"
        place = ["--listen", address] if role == "ffn" else ["--peer", address, "--port", "0"]
        options = ["--rendezvous-timeout", "4", str(checkpoints["qwen3-moe"]), *ENGINE]
        ended = run_roles(python, tmp_path, {role: [role, *place, *options]})[role]
    assert ended.status == NOT_MET, verdict(ended)
    assert str(port.port) in verdict(ended)
    assert "rendezvous" in verdict(ended)
    if role == "ffn":
        assert "attention lane 0" in verdict(ended)
        assert "--worker-cls" in verdict(ended)


@pytest.mark.parametrize("role", ["ffn", "attention"])
def test_a_port_in_use_is_named(
    role: str, python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        place = ["--listen", f"127.0.0.1:{number}"] if role == "ffn" else ["--port", str(number)]
        ended = run_roles(python, tmp_path, {role: [role, *place, str(checkpoints["qwen3-moe"]), *ENGINE]})[
            role
        ]
    assert ended.status == REFUSED, verdict(ended)
    assert str(number) in verdict(ended)


def test_an_moe_layer_that_escapes_the_seam_stops_both_roles(
    python: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM's generic Transformers back end builds runners or experts of classes of its own."""
    with PortReservation() as port:
        address = f"127.0.0.1:{port.port}"
        options = [str(checkpoints["qwen3-moe"]), *ENGINE, "--model-impl", "transformers"]
        ended = run_roles(
            python,
            tmp_path,
            {
                "ffn": ["ffn", "--listen", address, *options],
                "attention": ["attention", "--peer", address, "--port", "0", *options],
            },
        )
    for role in ("ffn", "attention"):
        assert ended[role].status == REFUSED, verdict(ended[role])
        assert "vllm.model_executor.models.transformers.moe.Transformers" in verdict(ended[role])
        assert "escapes the AFD seam" in verdict(ended[role])


def test_a_model_without_experts_is_refused(python: Path, tmp_path: Path) -> None:
    model = tmp_path / "dense"
    model.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 128,
        "max_position_embeddings": 512,
    }
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = [str(model), *ENGINE, "--skip-tokenizer-init"]
    ended = run_roles(python, tmp_path, {"serve": ["serve", "--port", "0", *options]})["serve"]
    assert ended.status == REFUSED, verdict(ended)
    assert "MoE" in verdict(ended)
