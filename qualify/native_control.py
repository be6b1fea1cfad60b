# SPDX-License-Identifier: Apache-2.0
"""Native vLLM, with AFD disabled, really serves here: the control that every AFD result is compared with.

`python -m qualify.native_control --cell cpu`. One native operator against plain torch, then vLLM's own server
on a small checkpoint: load, readiness, real requests over HTTP. The oracle is independent of vLLM: the same
checkpoint in transformers must give each chosen token the same log probability and no other token a clearly
better one. Both compute in float32: the test models are made to amplify rounding, so that in bfloat16 two correct
programs differ by more than a wrong one would have to. Then the server must end by itself and leave nothing.
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

from afd_plugin.demo.checkpoints import make
from afd_plugin.demo.client import RequestError
from afd_plugin.demo.engine import CPU_ENVIRONMENT, EngineArguments
from afd_plugin.demo.prompts import PROMPTS
from afd_plugin.demo.records import Generation
from afd_plugin.demo.service import Service, ServiceError, native_command
from qualify.cells import CellError, load
from qualify.execution import METRICS
from qualify.process import CommandError, capture, clean_environment

MODELS = ("qwen3-moe", "deepseek-v2")
TOLERANCE = 0.01
"""Largest difference of a log probability between vLLM and transformers, both in float32 (natural log)."""

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


def oracle(model: Path, answers: Sequence[Generation]) -> float:
    """The largest difference between vLLM's log probabilities and transformers' float32; ControlError past the bound.

    Each answer is scored whole: prompt and generated tokens go through the model once.
    """
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    reference.train(False)
    worst = 0.0
    for answer in answers:
        ids = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids]])
        with torch.inference_mode():
            scores = reference(ids).logits[0].float().log_softmax(-1)
        start = len(answer.prompt_token_ids)
        for position, (token, candidates) in enumerate(
            zip(answer.token_ids, answer.top_logprobs, strict=True)
        ):
            row = scores[start + position - 1]
            said = dict(candidates)[token]
            off = max(abs(said - row[token].item()), row.max().item() - row[token].item())
            worst = max(worst, off)
    if worst > TOLERANCE:
        raise ControlError(
            f"{model.name}: vLLM and transformers differ by {worst:.3f} in a log probability; "
            f"at most {TOLERANCE} is rounding"
        )
    return worst


def control(model: Path, folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Serve one checkpoint natively, judge the answers, stop; the metrics of the run."""
    with Service(
        native_command, model, model.name, EngineArguments(dtype="float32"), folder, environment
    ) as service:
        ready = service.await_ready()
        timed = [service.endpoint.complete(prompt) for prompt in PROMPTS[:4]]
        status = service.stop()
    if status:
        raise ControlError(f"{model.name}: the native server ended with {status}; {service.tail()}")
    if short := [index for index, (answer, _) in enumerate(timed) if len(answer.token_ids) == 0]:
        raise ControlError(f"{model.name}: no tokens for the requests {short}")
    worst = oracle(model, [answer for answer, _ in timed])
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {
        "ready_s": ready,
        "request_s": max(s for _, s in timed),
        "oracle_difference": worst,
        "peak_mib": peak,
    }


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
        print(f"native control of {cell.name} needs its GPU: not written yet", file=sys.stderr)
        return 2
    environment = {**clean_environment(), **CPU_ENVIRONMENT}
    metrics: dict[str, float] = {}
    try:
        print(
            capture([sys.executable, "-c", OPERATOR], env=environment, timeout_s=300).stdout.strip(),
            flush=True,
        )
        with tempfile.TemporaryDirectory(prefix="afd-native-") as scratch:
            for name in chosen.model or MODELS:
                seen = control(make(name), Path(scratch) / name, environment)
                print(
                    f"native {name}: {json.dumps({key: round(value, 3) for key, value in seen.items()})}",
                    flush=True,
                )
                metrics |= {f"{name}_{key}": value for key, value in seen.items()}
    except (ControlError, ServiceError, RequestError, CommandError) as error:
        print(error, file=sys.stderr)
        return 1
    if target := os.environ.get(METRICS):
        Path(target).write_text(json.dumps(metrics), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
