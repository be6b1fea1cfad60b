# SPDX-License-Identifier: Apache-2.0
"""Runs the demo: every checkpoint served natively and as 1A1F, the same requests to both, one report.

The two servers of a checkpoint start together (starting is nearly all imports and uses every core); nothing
starts or stops while requests are timed, and the requests alternate between the two.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from afd_plugin.demo import checkpoints
from afd_plugin.demo.client import Endpoint, RequestError
from afd_plugin.demo.engine import CPU_ENVIRONMENT, EngineArguments
from afd_plugin.demo.parity import Parity, compare
from afd_plugin.demo.prompts import MAX_TOKENS, PROMPTS
from afd_plugin.demo.recipes import RECIPES, Recipe
from afd_plugin.demo.records import Generation, Record
from afd_plugin.demo.report import Outcome, print_report, write_report
from afd_plugin.demo.service import Command, Service, ServiceError, afd_command, native_command

REPORT_NAME = "demo-report.json"
TIMED_ROUNDS = 2
"""How often each prompt is sent to each server; the first round is the compared one."""

CPU_CELL_NOTE = (
    "CPU cell: DeepSeek runs the MHA path here (MLA is disabled, VLLM_MLA_DISABLE=1); no MLA or GPU claim"
)


def run_demo(
    names: Iterable[str] = tuple(RECIPES),
    report: Path = Path(REPORT_NAME),
    console: Console | None = None,
    cache: Path | None = None,
) -> int:
    """Run the demo and return its exit code: 0 when native and AFD agree in everything, else 1.

    Args:
        names: checkpoints to serve, of `recipes.RECIPES`.
        report: file that receives the report.
        console: where progress and the table go.
        cache: folder of the checkpoints; `checkpoints.cache_folder()` by default.

    Raises:
        ServiceError: a server did not start or stop.
    """
    out = Console() if console is None else console
    started = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    folder = Path(tempfile.mkdtemp(prefix="afd-demo-"))  # kept, with the logs, when a server fails
    for name in names:
        recipe = RECIPES[name]
        model = checkpoints.make_recipe(recipe, cache)
        outcomes[name] = serve_both(recipe, model, folder / name, out)
    shutil.rmtree(folder)
    details: dict[str, Any] = {
        "cell": {"name": "cpu", "note": CPU_CELL_NOTE},
        "engine_arguments": EngineArguments().keywords(),
        "seconds": round(time.monotonic() - started, 1),
    }
    write_report(outcomes, details, report)
    print_report(outcomes, out)
    out.print(f"Report: {report.resolve()} ({details['seconds']:.0f} s)", highlight=False, soft_wrap=True)
    return 1 if any(outcome.faults() for outcome in outcomes.values()) else 0


def serve_both(
    recipe: Recipe,
    model: Path,
    folder: Path,
    console: Console,
    commands: Mapping[str, Command] | None = None,
) -> Outcome:
    """Serve one checkpoint natively and as 1A1F, send both the same requests, return what was found."""
    engine = EngineArguments()
    environment = child_environment()
    chosen = commands or {"native": native_command, "afd": afd_command}
    with ExitStack() as stack:
        services = {
            kind: stack.enter_context(
                Service(command, model, recipe.name, engine, folder / kind, environment)
            )
            for kind, command in chosen.items()
        }
        console.print(f"{recipe.name}: starting native vLLM and AFD ...", highlight=False)
        ready = max(service.await_ready() for service in services.values())
        console.print(f"{recipe.name}: both serve after {ready:.0f} s; sending requests ...", highlight=False)
        try:
            records, steps = exchange_requests({kind: service.endpoint for kind, service in services.items()})
        except RequestError as error:
            logs = "\n".join(f"{kind}: {service.tail(80)}" for kind, service in services.items())
            raise ServiceError(f"{error}\n{logs}") from error
        for kind, service in services.items():
            status = service.stop()
            if status and kind == "afd":
                raise ServiceError(f"AFD ended with status {status} instead of 0; {service.tail()}")
        reports = services["afd"].role_reports()
    parity = compare(records["native"], records["afd"])
    return outcome_of(recipe, parity, sum(checkpoints.tensor_bytes(model).values()), reports, steps)


def exchange_requests(endpoints: Mapping[str, Endpoint]) -> tuple[dict[str, Record], dict[str, float]]:
    """Send every prompt to every server, alternating; returns the records and the ms per decode step.

    A decode step's time is the difference between an answer of `MAX_TOKENS` tokens and one of a single
    token, over the steps between them: the prefill and the HTTP overhead cancel. It is the median over all
    prompts and rounds.
    """
    answers: dict[str, list[Generation]] = {kind: [] for kind in endpoints}
    step_times: dict[str, list[float]] = {kind: [] for kind in endpoints}
    for turn in range(TIMED_ROUNDS):
        for prompt in PROMPTS:
            for kind, endpoint in endpoints.items():
                _, prefill = endpoint.complete(prompt, max_tokens=1)
                generation, whole = endpoint.complete(prompt)
                step_times[kind].append(1000 * (whole - prefill) / (MAX_TOKENS - 1))
                if turn == 0:
                    answers[kind].append(generation)
    records = {kind: Record(tuple(generations)) for kind, generations in answers.items()}
    return records, {kind: statistics.median(times) for kind, times in step_times.items()}


def outcome_of(
    recipe: Recipe,
    parity: Parity,
    native_bytes: int,
    reports: Mapping[str, Mapping[str, Any]],
    steps: Mapping[str, float],
) -> Outcome:
    """Combine a comparison with what the workers reported; ServiceError when a role reported nothing."""
    attention = [report for name, report in reports.items() if name.startswith("attention-")]
    ffn = [report for name, report in reports.items() if name.startswith("ffn-")]
    if not attention or not ffn:
        raise ServiceError(f"reports of both roles were expected, found {sorted(reports)}")
    return Outcome(
        parity=parity,
        native_bytes=native_bytes,
        attention_bytes=_total(attention, "weight_bytes"),
        ffn_bytes=_total(ffn, "weight_bytes"),
        attention_expert_bytes=_total(attention, "expert_bytes"),
        native_ms_per_step=round(steps["native"], 3),
        afd_ms_per_step=round(steps["afd"], 3),
        exchanges_per_step=attention[0]["exchanges_per_step"],
        note=recipe.cpu_note,
    )


def child_environment() -> dict[str, str]:
    """The environment of every server: this process's, the CPU cell's variables, and byte-code allowed.

    Without byte-code every process compiles vLLM and torch from source, which doubles a start.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **CPU_ENVIRONMENT}


def _total(reports: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(int(report[key]) for report in reports)
