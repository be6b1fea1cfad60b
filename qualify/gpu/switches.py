# SPDX-License-Identifier: Apache-2.0
"""Levers for speed as switches of the code, by name: what the timeline and the bench compare with the plain run.

A lever counts only when the timeline shows where its microseconds went and parity holds with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Switch:
    """How a pair is started differently, and what is expected of it."""

    expectation: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of :func:`qualify.gpu.engines.pair`."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Of both roles."""


SWITCHES: Mapping[str, Switch] = {
    "shared-on-attention": Switch(
        "shared experts run while the rows are with the FFN: fewer nodes between its wait and its push",
        options={"shared": "attention"},
    ),
    "shared-in-line": Switch(
        "no fork and join of streams in the FFN's graph: worth it where launches cost more than the overlap gains",
        environment={"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"},
    ),
    "gate-on-attention": Switch(
        "the gate leaves the FFN's path; its logits travel in the same push", options={"gate": "attention"}
    ),
    "eager-modules": Switch(
        "no lazy loading of kernels in either process, in case a first launch hides in the figures",
        environment={"CUDA_MODULE_LOADING": "EAGER"},
    ),
    "many-connections": Switch(
        "more hardware queues for each client of MPS, so that one role's launches do not wait behind another's",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
    ),
}


def chosen(names: Sequence[str]) -> dict[str, Switch]:
    """Switches by name; KeyError names one that does not exist."""
    return {name: SWITCHES[name] for name in names}
