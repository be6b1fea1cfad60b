# SPDX-License-Identifier: Apache-2.0
"""Run lm-eval against one server: `python -m qualify.accuracy.harness SPEC.json`, as a process of its own.

lm-eval asks over HTTP, one request in flight, with the tokenizer of the given folder; nothing is looked up outside
this machine. What it returns is written as it came, results and samples; judging them is `scoring`'s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qualify.process import tail

ROOT = Path(__file__).resolve().parents[2]
TASK_FILES = Path(__file__).with_name("lm_eval")
REQUEST_TIMEOUT_S = 60


class HarnessFailed(RuntimeError):
    """lm-eval did not come to a result; the message quotes the end of what it wrote."""


@dataclass(frozen=True)
class Spec:
    """One evaluation: which server, which tasks, from which data."""

    url: str
    model: str
    tokenizer: str
    tasks: tuple[str, ...]
    max_length: int
    output: str
    limit: int | None = None
    """Only for diagnosis: lm-eval takes the first rows of each task."""


def evaluate(spec: Spec) -> dict[str, Any]:
    """What lm-eval returns; imports it. Runs in the folder that holds the data."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": spec.model,
            "base_url": spec.url,
            "tokenizer": spec.tokenizer,
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "add_bos_token": True,
            "num_concurrent": 1,
            "max_retries": 1,
            "max_length": spec.max_length,
            "timeout": REQUEST_TIMEOUT_S,
        },
        tasks=list(spec.tasks),
        batch_size=1,
        limit=spec.limit,
        bootstrap_iters=0,
        log_samples=True,
        task_manager=TaskManager(include_path=str(TASK_FILES), include_defaults=False),
    )
    if found is None:
        raise HarnessFailed("lm-eval returned nothing")
    return dict(found)


def run(spec: Spec, data: Path, scratch: Path, timeout_s: float) -> Path:
    """Evaluate in a child process; the file with what lm-eval returned. HarnessFailed when it did not."""
    scratch.mkdir(parents=True, exist_ok=True)
    asked = scratch / "spec.json"
    asked.write_text(json.dumps(asdict(spec)), encoding="utf-8")
    environment = {
        **os.environ,
        "HF_DATASETS_CACHE": str(scratch / "datasets"),
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "TQDM_DISABLE": "1",
    }
    log = scratch / "lm-eval.log"
    with log.open("wb") as out:
        status: int | str
        try:
            status = subprocess.run(
                [sys.executable, "-m", "qualify.accuracy.harness", str(asked)],
                cwd=data,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"no result within {timeout_s:.0f} s"
    output = Path(spec.output)
    if status != 0 or not output.is_file():
        raise HarnessFailed(
            f"lm-eval against {spec.url} ended with {status}:\n{tail(log.read_text(errors='replace'))}"
        )
    return output


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate the spec of the named file and write what lm-eval returned."""
    (asked,) = sys.argv[1:] if arguments is None else arguments
    content = json.loads(Path(asked).read_text(encoding="utf-8"))
    spec = Spec(**{**content, "tasks": tuple(content["tasks"])})
    found = evaluate(spec)
    kept = {name: found[name] for name in ("results", "n-samples", "configs", "versions", "samples")}
    Path(spec.output).write_text(json.dumps(kept, indent=0, sort_keys=True, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
