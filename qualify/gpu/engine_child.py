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
    """`engine_child.py JSON`: the engine arguments. Commands are the keys of `_COMMANDS`, and stop."""
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


def _clients(engine: LLM, command: dict[str, Any]) -> dict[str, Any]:
    """As many clients at once, each of which sends its next prompt when it has its answer.

    One step after the other in this process, so two engines with the same commands run the same batches. Counts the
    steps after which a prompt was read in part.
    """
    from vllm import SamplingParams
    from vllm.v1.engine.core_client import InprocClient

    core = engine.llm_engine.engine_core
    if not isinstance(core, InprocClient):
        raise TypeError(f"the engine core is {type(core)}; the scheduler of this process was to be read")
    scheduler = core.engine_core.scheduler
    prompts, lengths = command["prompts"], command["lengths"]
    waiting = list(range(len(prompts)))[::-1]
    rows: list[dict[str, Any]] = [{} for _ in prompts]
    steps = partial = most = 0
    open_requests = 0
    while waiting or open_requests:
        while waiting and open_requests < command["clients"]:
            index = waiting.pop()
            sampling = SamplingParams(
                temperature=0.0, max_tokens=lengths[index], logprobs=command["logprobs"], ignore_eos=True,
                detokenize=False,
            )  # fmt: skip
            engine.llm_engine.add_request(str(index), _prompts([prompts[index]])[0], sampling)
            open_requests += 1
        for output in engine.llm_engine.step():
            if output.finished:
                rows[int(output.request_id)] = _row(output)  # type: ignore[arg-type]  # no pooling request was added
                open_requests -= 1
        steps += 1
        running = scheduler.running  # type: ignore[attr-defined]  # vLLM's own scheduler has it, its interface not
        most = max(most, len(running))
        partial += any(0 < request.num_computed_tokens < request.num_prompt_tokens for request in running)
    return {"rows": rows, "steps": steps, "partial_prefill_steps": partial, "most_running": most}


def _profile(engine: LLM, command: dict[str, Any]) -> dict[str, Any]:
    """A few steps under vLLM's own profiler, which reaches both roles."""
    engine.start_profile()
    result = _time(engine, command)
    engine.stop_profile()
    return result


def _rpc(engine: LLM, command: dict[str, Any]) -> Any:
    return engine.collective_rpc(command["method"])


_COMMANDS = {"generate": _generate, "time": _time, "clients": _clients, "profile": _profile, "rpc": _rpc}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
