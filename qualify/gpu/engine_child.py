# SPDX-License-Identifier: Apache-2.0
"""One engine as a child process that does what its standard input says, one JSON object a line.

With the engine core in this process, nothing but the requests of a command decides which of them share a
step, so two engines that get the same commands see the same batches. Answers go to standard output as lines
that begin with a mark, since vLLM's own log shares that stream.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

MARK = "@@"


def answer(content: object) -> None:
    """Write one answer."""
    sys.stdout.write(f"{MARK}{json.dumps(content)}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """`engine_child.py JSON`: the engine arguments. Commands: generate, time, rpc, profile, stop."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    started = time.monotonic()
    engine = LLM(**json.loads(arguments[0]), disable_log_stats=True)
    answer({"ready_s": round(time.monotonic() - started, 2)})
    try:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "stop":
                break
            answer(_COMMANDS[command["do"]](engine, command))
    finally:
        engine.llm_engine.engine_core.shutdown()
    answer({"stopped": True})
    return 0


def _prompts(ids: Sequence[Sequence[int]]) -> list[Any]:
    from vllm import TokensPrompt

    return [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in ids]


def _generate(engine: LLM, command: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy answers with logprobs; all prompts are queued before the first step."""
    from vllm import SamplingParams

    lengths = command["lengths"]
    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=length,
            logprobs=command["logprobs"],
            ignore_eos=True,
            detokenize=False,
        )
        for length in lengths
    ]
    outputs = engine.generate(_prompts(command["prompts"]), sampling, use_tqdm=False)
    return [_row(output) for output in outputs]


def _row(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            sorted([int(token), float(entry.logprob)] for token, entry in position.items())
            for position in completion.logprobs or []
        ],
    }


def _time(engine: LLM, command: dict[str, Any]) -> dict[str, Any]:
    """Seconds for the same prompts with few and with many tokens: their difference is decoding alone."""
    from vllm import SamplingParams

    prompts = _prompts(command["prompts"])
    seconds, tokens = [], []
    for length in command["lengths"]:
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
    few, many = command["lengths"]
    checksum = hash(tuple(map(tuple, tokens))) & 0xFFFFFFFF
    return {
        "tpot_ms": (seconds[1] - seconds[0]) / (many - few) * 1e3,
        "seconds": seconds,
        "checksum": checksum,
    }


def _rpc(engine: LLM, command: dict[str, Any]) -> Any:
    return engine.collective_rpc(command["method"])


_COMMANDS = {"generate": _generate, "time": _time, "rpc": _rpc}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
