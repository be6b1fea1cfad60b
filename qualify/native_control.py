# SPDX-License-Identifier: Apache-2.0
"""Native vLLM, without AFD, really serves here: the control that every AFD result is compared with.

`python -m qualify.native_control --cell cpu`. First the runtime must be exactly the cell. Then one native operator
is compared with plain torch, and vLLM's own server, which loads no plugin at all, serves small checkpoints over HTTP:
load, readiness, real eager requests, prefills in chunks. The oracle is independent of vLLM: transformers, given the
same files, must find the log probability of every candidate that vLLM named, and no token better than the one that
vLLM chose. Then the server must end by itself and leave nothing.

Both compute in float32: the test models are made to amplify rounding, so that in bfloat16 two correct programs differ
by as much as a wrong one (0.6). And the control shows in every run that it can fail: against a reference in which one
expert of one layer is 1 % too strong, the same answers must not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from afd_plugin.demo.checkpoints import make
from afd_plugin.demo.client import RequestError
from afd_plugin.demo.engine import CPU_ENVIRONMENT, EngineArguments
from afd_plugin.demo.prompts import PROMPTS
from afd_plugin.demo.records import Generation
from afd_plugin.demo.service import Service, ServiceError, native_command
from afd_plugin.supervisor.signals import leave_by_exit
from qualify import identity
from qualify.cells import Cell, CellError, load
from qualify.execution import METRICS
from qualify.process import CommandError, capture, clean_environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODELS = ("qwen3-moe", "deepseek-v2")
BOUND = 1e-3
"""Largest difference of a log probability (natural log) between vLLM and transformers that is still rounding.

Measured on the CPU cell: 6e-5 at most over all prompts of both models; 1e-2 for the smallest fault planted, a norm
weight or an expert of one layer that is 1 % off; 1 and more for an expert that is missing or another expert's.
"""

NO_PLUGIN = {"VLLM_PLUGINS": ""}
"""vLLM loads the plugins named here: none, so AFD is not even imported."""

FAULT = 1.01
"""The factor on one expert's output in the faulty reference."""

OPERATOR = """
import torch, vllm._custom_ops  # registers torch.ops._C
torch.manual_seed(0)
x = torch.randn(7, 64, dtype=torch.bfloat16)
out = torch.empty(7, 32, dtype=torch.bfloat16)
torch.ops._C.silu_and_mul(out, x)
want = torch.nn.functional.silu(x[:, :32].float()) * x[:, 32:].float()
worst = (out.float() - want).abs().max().item()
assert worst < 2e-2 * want.abs().max().item(), worst
print(f"operator silu_and_mul: largest difference {worst:.4f}")
"""


class ControlError(RuntimeError):
    """Native vLLM did not do what it must; the message says what was seen."""


def reference(model: Path) -> PreTrainedModel:
    """The checkpoint in transformers, in float32."""
    from transformers import AutoModelForCausalLM

    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, dtype="float32", local_files_only=True
    )
    loaded.train(False)
    return loaded


def plant(model: PreTrainedModel) -> str:
    """Make one expert of the last layer `FAULT` times as strong; the parameter's name."""
    import torch

    experts = [name for name, _ in model.named_parameters() if name.endswith("mlp.experts.down_proj")]
    if not experts:
        raise ControlError(
            f"{type(model).__name__} has no parameter mlp.experts.down_proj to plant a fault in"
        )
    with torch.no_grad():
        model.get_parameter(experts[-1])[0].mul_(FAULT)
    return experts[-1]


def difference(model: PreTrainedModel, answers: Sequence[Generation]) -> float:
    """The largest difference between an answer and the reference, over all positions.

    At each position: of the log probability of each candidate that the answer names, and how much likelier than the
    chosen token the reference's own best one is. Each answer is scored whole, in one pass.
    """
    import torch

    worst = 0.0
    for answer in answers:
        ids = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids]])
        with torch.inference_mode():
            scores = model(ids).logits[0].double().log_softmax(-1)
        before = len(answer.prompt_token_ids) - 1
        positions = zip(answer.token_ids, answer.top_logprobs, scores[before:-1], strict=True)
        for token, candidates, row in positions:
            worst = max(worst, row.max().item() - row[token].item())
            worst = max(worst, *(abs(said - row[name].item()) for name, said in candidates))
    return worst


def judge(name: str, seen: float, planted: float) -> None:
    """ControlError unless the answers pass against the reference and fail against the faulty one."""
    if not seen <= BOUND:
        raise ControlError(
            f"{name}: vLLM and transformers differ by {seen:.2g} in a log probability; at most {BOUND:g} is rounding"
        )
    if not planted > BOUND:
        raise ControlError(
            f"{name}: a planted fault moves a log probability by {planted:.2g} only, so a bound of {BOUND:g} "
            "cannot find one"
        )


def control(model: Path, folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Serve one checkpoint natively, judge the answers, stop; the metrics of the run."""
    with Service(
        native_command, model, model.name, EngineArguments(dtype="float32"), folder, environment
    ) as service:
        ready = service.await_ready()
        timed = [service.endpoint.complete(prompt) for prompt in PROMPTS]
        status = service.stop()
    if status:
        raise ControlError(f"{model.name}: the native server ended with {status}; {service.tail()}")
    if short := [index for index, (answer, _) in enumerate(timed) if len(answer.token_ids) == 0]:
        raise ControlError(f"{model.name}: no tokens for the requests {short}")
    answers = [answer for answer, _ in timed]
    other = reference(model)
    seen = difference(other, answers)
    plant(other)
    planted = difference(other, answers)
    judge(model.name, seen, planted)
    return {
        "ready_s": ready,
        "request_s": max(s for _, s in timed),
        "difference": seen,
        "planted_difference": planted,
        "peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def runtime(cell: Cell) -> None:
    """ControlError unless what runs is exactly the cell."""
    if faults := identity.reconcile(cell, identity.observe()):
        raise ControlError(f"this environment is not the cell {cell.name}:\n  " + "\n  ".join(faults))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when native vLLM serves and agrees with the oracle, 1 when not, 2 for a cell that it does not know."""
    parser = argparse.ArgumentParser(prog="python -m qualify.native_control", description=__doc__)
    parser.add_argument("--cell", required=True)
    parser.add_argument("--model", action="append", help=f"default: {' and '.join(MODELS)}")
    chosen = parser.parse_args(arguments)
    try:
        cell = load(chosen.cell)
    except CellError as error:
        print(error, file=sys.stderr)
        return 2
    if cell.devices:
        from qualify.gpu.__main__ import main as gpu

        return gpu(["control", "--cell", cell.name, "--out", "out/gpu"])
    environment = {**clean_environment(), **CPU_ENVIRONMENT, **NO_PLUGIN}
    metrics: dict[str, float] = {}
    try:
        runtime(cell)
        print(
            capture([sys.executable, "-c", OPERATOR], env=environment, timeout_s=300).stdout.strip(),
            flush=True,
        )
        with tempfile.TemporaryDirectory(prefix="afd-native-") as scratch:
            for name in chosen.model or MODELS:
                seen = control(make(name), Path(scratch) / name, environment)
                shown = {key: float(f"{value:.3g}") for key, value in seen.items()}
                print(f"native {name}: {json.dumps(shown)}", flush=True)
                metrics |= {f"{name}_{key}": value for key, value in seen.items()}
    except (ControlError, ServiceError, RequestError, CommandError) as error:
        print(error, file=sys.stderr)
        return 1
    if target := os.environ.get(METRICS):
        Path(target).write_text(json.dumps(metrics), encoding="utf-8")
    return 0


if __name__ == "__main__":
    leave_by_exit()
    sys.exit(main())
