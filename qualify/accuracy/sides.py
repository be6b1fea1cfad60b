# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared: native vLLM, and `afd serve` in each layout, with the same engine arguments."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def serving(
    layout: Layout, model: Path, folder: Path, engine: EngineArguments = ENGINE, *, gpu: bool = False
) -> Iterator[Service]:
    """A server that is ready; ServiceError unless it ends with 0 when asked to. On the CPU unless `gpu`."""
    environment = {**clean_environment(), **({} if gpu else CPU_ENVIRONMENT)}
    with Service(layout.command, model, MODEL_NAME, engine, folder, environment) as service:
        service.await_ready(GPU_START_S if gpu else START_TIMEOUT_S)
        yield service
        status = service.stop()
        if status:
            raise ServiceError(f"the {layout.value} server ended with {status}; {service.tail()}")


def completions_url(service: Service) -> str:
    """Where lm-eval asks."""
    return f"http://{service.endpoint.host}:{service.endpoint.port}/v1/completions"
