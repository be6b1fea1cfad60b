# SPDX-License-Identifier: Apache-2.0
"""The command line answers fast, refuses in one sentence, and its reference is up to date."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afd_plugin.cli.app import run
from afd_plugin.cli.options import LaunchOptions
from qualify.cli_reference import DOCUMENT, updated

HEAVY = ("vllm", "torch", "zmq", "transformers", "pydantic_core._pydantic_core.vllm")
STANDARD = "import asyncio, email, http.client, json, logging, subprocess, typing"
"""What this interpreter takes for these, coverage's start-up hook included, is the measure of a fast start."""


def _afd(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "afd_plugin.cli", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _python(code: str) -> tuple[float, str]:
    """The seconds of a processor that ``code`` takes in an interpreter of its own, and what it prints."""
    begun = _children_seconds()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return _children_seconds() - begun, done.stdout


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom afd_plugin.cli.app import run\nassert run(['serve', '--help']) == 0\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\nassert not heavy, heavy"
    )
    assert "--attention-dp" in _python(code)[1]
    # Processor time, and the least of three: the machine may be busy with other tests.
    pairs = [(_python(code)[0], _python(STANDARD)[0]) for _ in range(3)]
    fastest, measure = (min(seconds) for seconds in zip(*pairs, strict=True))
    assert fastest < 8 * measure, f"{fastest:.2f} s, and {measure:.2f} s for a part of the standard library"


def test_vllms_short_options_are_passed_on_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LaunchOptions] = []
    monkeypatch.setattr("afd_plugin.cli.run.run_serve", lambda options: seen.append(options) or 0)
    words = ("-cc.cudagraph_mode=FULL_DECODE_ONLY", "-O2", "-ac.backend=TRITON_ATTN", "--max-num-seqs", "8")
    assert run(["serve", "model", "--device", "cpu", *words]) == 0
    assert seen[0].vllm == words


@pytest.mark.parametrize("words", [["-h"], ["serve", "-h"], ["serve", "model", "-h"]])
def test_help_is_had_by_its_short_name_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0
    assert "Usage: afd" in capsys.readouterr().out


def test_the_launching_side_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys\nimport afd_plugin.cli.run, afd_plugin.cli.preflight, afd_plugin.cli.child\n"
        "import afd_plugin.cli.attention_main, afd_plugin.cli.ffn_main\n"
        "assert not {'vllm', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["serve"], "Missing argument"),
        (["serve", "--max-model-len", "128", "M"], "The model comes first"),
        (["serve", "M", "--attention-dp", "0"], "attention_dp is 0"),
        (["serve", "M", "--ffn-tp", "-1"], "ffn_tp is -1"),
        (["serve", "M", "--attention-dp", "2", "--ffn-dp", "3"], "3 FFN groups for 2 attention lanes"),
        (["serve", "M", "--gate", "nowhere"], "'nowhere' is not one of"),
        (["serve", "M", "--connector", "Carrier"], "afd.connector is 'Carrier'"),
        (["serve", "M", "--microbatches", "3"], "microbatches is 3"),
        (["serve", "M", "--device", "tpu"], "--device is 'tpu'"),
        (["serve", "M", "--port", "70000"], "--port is 70000"),
        (["serve", "M", "--rendezvous-timeout", "0"], "--rendezvous-timeout is 0"),
        (["serve", "M", "--pipeline-parallel-size", "2"], "Pipeline parallelism is not supported"),
        (["serve", "M", "--ffn-args", "--enable-lora"], "LoRA is not supported"),
        (["attention", "M", "-tp", "2"], "use --attention-tp"),
        (["attention", "M", "--token-file", "/nonexistent"], "cannot be read"),
        (["ffn", "M", "--listen", "nonsense"], "expected host:port"),
        (["ffn", "M", "--listen", "127.0.0.1:0"], "must be told a port"),
        (["check", "--listen", "nonsense"], "expected HOST:PORT"),
        (["demo", "no-such-model"], "There is no checkpoint 'no-such-model'"),
        (["unknown"], "No such command"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err.replace("\n", " ")
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback_of_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "M", "--microbatches", "3", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_request_for_the_v2_runner_is_refused() -> None:
    done = _afd("serve", "M", VLLM_USE_V2_MODEL_RUNNER="1")
    assert done.returncode == 2
    assert done.stderr.startswith("afd: unsupported-feature: VLLM_USE_V2_MODEL_RUNNER is '1'")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "option"), [("serve", "--port"), ("attention", "--port"), ("ffn", "--listen")]
)
def test_a_port_in_use_is_refused_before_anything_starts(command: str, option: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = str(holder.getsockname()[1])
        begun = time.monotonic()
        done = _afd(command, "M", option, port if option == "--port" else f"127.0.0.1:{port}")
    assert done.returncode == 2
    assert f"Port {port} on 127.0.0.1 is not free" in done.stderr
    assert time.monotonic() - begun < 10


def test_version_names_both_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("afd-plugin 0.28.0 (vLLM ")


def test_the_documented_options_are_the_real_ones() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document == updated(document), "run python -m qualify.cli_reference"


def test_the_documented_worker_classes_and_variables_exist() -> None:
    from afd_plugin.config import AFDConfig, LinkSettings, Role
    from afd_plugin.v1.refusals import WORKER_CLASSES

    document = DOCUMENT.read_text(encoding="utf-8")
    root = Path(__file__).parents[3]
    for path in WORKER_CLASSES.values():
        module, _, name = path.rpartition(".")
        if path in document:
            assert f"class {name}(" in (root / f"{module.replace('.', '/')}.py").read_text()
    for variable in LinkSettings().to_env():
        assert f"| `{variable}` |" in document
    for key in AFDConfig(Role.ATTENTION).to_additional_config():
        assert f"`{key}`" in document
