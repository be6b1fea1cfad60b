# SPDX-License-Identifier: Apache-2.0
"""From the sizes and placements that a user typed to a validated configuration."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from afd_plugin.config import AFDConfig, DensePlacement, GatePlacement, Role, SharedPlacement
from afd_plugin.errors import ConfigRefused

FfnShards = Annotated[
    int,
    typer.Option(
        "--ffn-shards",
        help="FFN processes that each hold a part of every layer's experts and share no vLLM world.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine", help="K/N: this is attention engine K (from 0) of N that share an FFN and nothing else."
    ),
]
Engines = Annotated[
    int,
    typer.Option(
        "--engines", help="Attention engines of their own that this FFN serves (`--engine K/N` there)."
    ),
]

Shared = Annotated[
    SharedPlacement,
    typer.Option("--shared", help="Where shared experts run; on attention beside the exchange."),
]

SIZES = ("attention_dp", "attention_tp", "ffn_dp", "ffn_tp", "expert_parallel")


def afd_config(
    role: Role,
    sizes: tuple[int, int, int, int, bool],
    choices: tuple[GatePlacement, DensePlacement, SharedPlacement, str, int],
    shards: int = 1,
    engine: str | int = 1,
) -> AFDConfig:
    """The configuration of one command; ``engine`` is ``K/N``, or N alone where the FFN is told.

    Raises:
        ConfigRefused: ``engine`` cannot be read, or contradicts ``--attention-dp``.
        TopologyRefused: The sizes do not fit together.
    """
    gate, dense, shared, connector, microbatches = choices
    raw: dict[str, object] = {"role": role.value, **dict(zip(SIZES, sizes, strict=True))}
    raw.update(
        gate=gate.value, dense=dense.value, microbatches=microbatches, ffn_shards=shards, shared=shared.value
    )
    if connector != "auto":
        raw["connector"] = connector
    member, engines = _engine(engine)
    if engines > 1:
        if sizes[0] != 1:
            raise ConfigRefused("--attention-dp is for lanes of one engine; with --engine K/N leave it out.")
        raw.update(attention_dp=engines, independent_lanes=True)
    if role is Role.ATTENTION:
        raw["member"] = member
    return AFDConfig.parse(raw)


def _engine(text: str | int) -> tuple[int, int]:
    if isinstance(text, int):
        return 0, text
    if not text:
        return 0, 1
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigRefused(f"--engine is {text!r}; expected K/N with K from 0 to N - 1, for example 1/2.")
    return int(found[1]), int(found[2])
