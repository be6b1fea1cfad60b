# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenTelemetry set-up."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="init-tracer",
        symbol="vllm.tracing:init_tracer",
        kind=SeamKind.CALL,
        signature=(
            "def init_tracer(instrumenting_module_name: str, otlp_traces_endpoint: str, extra_attributes: "
            "dict[str, str] | None=None)"
        ),
        sha256="68f6c82c5ac02e7d73c47d9d9aa7cb05080a30992a699aab1eb800826ccf7d12",
        invariant=(
            "Sets this process's tracer provider and exporter, and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, by which "
            "workers that are started afterwards set theirs before they build anything."
        ),
        plan="propose upstream: a host for workers without an engine core",
        used_by=("afd_plugin.cli.ffn_main",),
        afd_tests=evidence.TRACING,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="tracing",
        owner="vllm.tracing:",
        names={
            "instrument_manual": "4c0a3e2ef5857486",
        },
        invariant="Writes a span with given times below the one that runs; does nothing where nothing is traced.",
        afd_tests=evidence.TRACING,
    ),
)
