# SPDX-License-Identifier: Apache-2.0
"""The options that several `afd` commands share, as types with their flags and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afd_plugin.config import CONNECTORS, DensePlacement, GatePlacement

Model = Annotated[str, typer.Argument(help="Folder or name of the model.")]
AttentionDP = Annotated[int, typer.Option("--attention-dp", help="Attention data-parallel ranks.")]
AttentionTP = Annotated[int, typer.Option("--attention-tp", help="Tensor-parallel ranks of each of them.")]
FfnDP = Annotated[int, typer.Option("--ffn-dp", help="FFN data-parallel ranks.")]
FfnTP = Annotated[int, typer.Option("--ffn-tp", help="Tensor-parallel ranks of each of them.")]
FfnEP = Annotated[bool, typer.Option("--ffn-ep/--no-ffn-ep", help="Shard whole experts over the FFN ranks.")]
Gate = Annotated[GatePlacement, typer.Option("--gate", help="Where router logits are computed.")]
Dense = Annotated[
    DensePlacement, typer.Option("--dense", help="Where the MLP of layers without experts runs.")
]
Connector = Annotated[
    str,
    typer.Option("--connector", help=f"Data plane: auto or one of {', '.join(CONNECTORS)}."),
]
Microbatches = Annotated[
    int, typer.Option("--microbatches", help="Stages per step: 1, or 2 to overlap the roles.")
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto: by the installed vLLM build.")]
Host = Annotated[str, typer.Option("--host", help="Where the OpenAI endpoint listens.")]
Port = Annotated[int, typer.Option("--port", help="Its port; 0 takes a free one.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help="File with the secret that both roles share; else the variable AFD_TOKEN."
    ),
]
Rendezvous = Annotated[
    float, typer.Option("--rendezvous-timeout", help="Seconds for the roles to find each other.")
]
ReadyTimeout = Annotated[
    float, typer.Option("--ready-timeout", help="Seconds from then until all weights are loaded.")
]
Failure = Annotated[
    float, typer.Option("--failure-timeout", help="Seconds until a lost or stopped peer is given up.")
]
Drain = Annotated[
    float, typer.Option("--drain-timeout", help="Seconds for running requests to finish on a stop.")
]
FfnRestart = Annotated[
    float,
    typer.Option(
        "--ffn-restart-window",
        help="Seconds for which requests are held while a failed FFN is started again; 0: they fail at once.",
    ),
]
Startup = Annotated[float, typer.Option("--startup-timeout", help="Seconds until the service must be ready.")]
Status = Annotated[
    str,
    typer.Option(
        "--status", help="HOST:PORT where the FFN answers /health, /ready, /metrics; port 0: a free one."
    ),
]
Debug = Annotated[bool, typer.Option("--debug/--no-debug", help="Show tracebacks of refusals and failures.")]
