# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared: native vLLM, and `afd serve` in each layout, with the same engine arguments."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from afd_plugin.demo.engine import CPU_ENVIRONMENT, EngineArguments
from afd_plugin.demo.service import HOST, START_TIMEOUT_S, Service, ServiceError, native_command
from qualify.process import clean_environment

MODEL_NAME = "trained"
GPU_START_S = 900.0
ENGINE = EngineArguments(max_model_len=2048, max_num_seqs=4)


class Layout(str, enum.Enum):
    """How the model is served."""

    NATIVE = "native"
    ONE_ONE = "1A1F"
    TWO_ONE = "2A1F"

    @property
    def attention_ranks(self) -> int:
        """Attention data-parallel ranks."""
        return 2 if self is Layout.TWO_ONE else 1

    def command(self, model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        """The command line of the server."""
        if self is Layout.NATIVE:
            return native_command(model, name, port, engine)
        roles = ["--attention-dp", str(self.attention_ranks), "--host", HOST, "--port", str(port)]
        server = [sys.executable, "-m", "afd_plugin.cli", "serve", *roles, str(model)]
        return [*server, "--served-model-name", name, *engine.serving_flags()]


@dataclass(frozen=True)
class Place:
    """Where and how a server runs: all of its environment, the bound of its start, what its command says beside."""

    environment: Mapping[str, str]
    start_s: float = START_TIMEOUT_S
    words: tuple[str, ...] = ()

    @classmethod
    def here(cls, *, gpu: bool = False) -> Place:
        """On this host: on the CPU unless `gpu`."""
        if gpu:
            return cls(clean_environment(), GPU_START_S)
        return cls({**clean_environment(), **CPU_ENVIRONMENT})


@contextmanager
def serving(
    layout: Layout, model: Path, folder: Path, engine: EngineArguments = ENGINE, place: Place | None = None
) -> Iterator[Service]:
    """A server that is ready; ServiceError unless it ends with 0 when asked to. On this host's CPU without `place`."""
    where = place or Place.here()

    def command(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        return [*layout.command(model, name, port, engine), *where.words]

    with Service(command, model, MODEL_NAME, engine, folder, where.environment) as service:
        service.await_ready(where.start_s)
        yield service
        status = service.stop()
        if status:
            raise ServiceError(f"the {layout.value} server ended with {status}; {service.tail()}")


def completions_url(service: Service) -> str:
    """Where lm-eval asks."""
    return f"http://{service.endpoint.host}:{service.endpoint.port}/v1/completions"
