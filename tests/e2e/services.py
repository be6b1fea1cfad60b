# SPDX-License-Identifier: Apache-2.0
"""Whole services behind HTTP for tests: `afd serve`, the plain worker-class form, and native vLLM."""

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from afd_plugin.config import AFDConfig, Role
from afd_plugin.demo.client import Endpoint
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.prompts import PROMPTS
from afd_plugin.demo.records import Record
from afd_plugin.demo.service import HOST, Command, Service
from tests.e2e.harness import environment
from tests.e2e.teardown import CaseFailed, Traces, end_marked, nothing_left


def afd_serve(python: Path | str = sys.executable, extra: Sequence[str] = ()) -> Command:
    """`afd serve` with further options; they go before the model, where the command's own options belong."""

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        options = ["--host", HOST, "--port", str(port), *extra]
        vllm = ["--served-model-name", name, *flags(engine)]
        return [str(python), "-m", "afd_plugin.cli", "serve", *options, str(model), *vllm]

    return command


def afd_attention(python: Path | str, extra: Sequence[str] = ()) -> Command:
    """`afd attention` with further options, `--peer` for one."""

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        options = ["--host", HOST, "--port", str(port), *extra]
        vllm = ["--served-model-name", name, *flags(engine)]
        return [str(python), "-m", "afd_plugin.cli", "attention", *options, str(model), *vllm]

    return command


def afd_ffn(python: Path | str, extra: Sequence[str] = ()) -> Command:
    """`afd ffn` with further options, `--listen` for one; it has no HTTP endpoint."""

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        return [str(python), "-m", "afd_plugin.cli", "ffn", *extra, str(model), *flags(engine)]

    return command


def vllm_serve(python: Path | str, extra: Sequence[str] = ()) -> Command:
    """vLLM's own server; with a worker class and `--additional-config` it is the plain form of attention."""

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        server = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        common = ["--host", HOST, "--port", str(port), "--served-model-name", name, *flags(engine)]
        return [*server, "--distributed-executor-backend", "mp", *common, *extra]

    return command


def ffn_only(python: Path | str, config: AFDConfig | None = None) -> Command:
    """An FFN process started by hand; it ends when attention shuts the service down."""
    content = json.dumps((config or AFDConfig(Role.FFN)).to_additional_config())

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        return [str(python), "-m", "afd_plugin.cli.ffn_main", content, str(model), *flags(engine)]

    return command


def flags(engine: EngineArguments) -> list[str]:
    """The engine's options; the roles' parallel sizes are options of `afd`, not of vLLM."""
    words = engine.flags()
    position = words.index("--tensor-parallel-size")
    return words[:position] + words[position + 2 :] if engine.tensor_parallel_size == 1 else words


@contextmanager
def running(
    command: Command, model: Path, engine: EngineArguments, folder: Path, *, native: bool = False, **env: str
) -> Iterator[Service]:
    """A service that is serving; on leaving it must end with 0 by itself, without force, and leave nothing behind.

    A `native` server is held to its exit code only: how it ends and what it leaves is vLLM's.
    """
    with (
        native_traces() if native else nothing_left(folder) as traces,
        Service(command, model, "m", engine, folder, environment({**traces.environment, **env})) as service,
    ):
        service.await_ready()
        traces.note()
        yield service
        status = service.stop()
        if status:
            raise CaseFailed(f"the service ended with {status}; {service.tail()}")


@contextmanager
def native_traces() -> Iterator[Traces]:
    """As `nothing_left`, but what is left is ended and removed without a word."""
    traces = Traces()
    try:
        yield traces
    finally:
        end_marked(traces.marker)
        traces.remove()


def together(endpoint: Endpoint, prompts: Sequence[str] = PROMPTS) -> Record:
    """The answers to all prompts, sent at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(endpoint.complete, prompts))
    return Record(tuple(generation for generation, _ in answers))
