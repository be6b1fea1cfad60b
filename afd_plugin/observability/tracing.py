# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry: whether this process is traced, and how its spans name the role and rank they come from.

vLLM sets the exporter up in every process of a service whose ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` is set (its option
``--otlp-traces-endpoint`` sets it), and writes spans of requests and of the start itself. What is added here goes to
that exporter and to no other; opentelemetry is imported only where it is used (:mod:`afd_plugin.observability.spans`).
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afd_plugin.observability.spans import StepSpans

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
SERVICE_VARIABLE = "OTEL_SERVICE_NAME"
RESOURCE_VARIABLE = "OTEL_RESOURCE_ATTRIBUTES"


def identify(environ: MutableMapping[str, str], role: str, rank: str) -> None:
    """Name this process and its children in their traces; what the user has named stays.

    Sets the attributes ``service.name`` (``afd-attention``, ``afd-ffn``), ``service.instance.id`` and ``afd.role`` in
    the variable from which opentelemetry's SDK reads them.
    """
    given = environ.get(RESOURCE_VARIABLE, "")
    names = {pair.partition("=")[0].strip() for pair in given.split(",")}
    own = {"service.instance.id": f"{role}-{rank}", "afd.role": role}
    if not environ.get(SERVICE_VARIABLE):
        own["service.name"] = f"afd-{role}"
    pairs = [given] if given else []
    pairs += [f"{name}={value}" for name, value in own.items() if name not in names]
    environ[RESOURCE_VARIABLE] = ",".join(pairs)


def step_spans(role: str, rank: str, *, first: bool) -> StepSpans | None:
    """What writes the spans of this process's steps; None where nothing is traced.

    ``first`` is whether a step's trace begins with this worker's span.
    """
    if not os.environ.get(ENDPOINT_VARIABLE):
        return None
    from opentelemetry.trace import get_tracer_provider

    from afd_plugin.observability.spans import StepSpans

    return StepSpans.of(get_tracer_provider(), role, rank, first=first)
