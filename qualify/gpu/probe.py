# SPDX-License-Identifier: Apache-2.0
"""Short questions to the GPU, each asked in a process of its own: `python -m qualify.gpu.probe facts|kernels`.

The command that starts the MPS daemon also quits it. While a client is left the daemon ends by force, which takes
seconds and on one host never came to an end, so that command must not be a client itself.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qualify.process import capture

LIMIT_S = 180.0
"""Of one question; importing torch and vLLM from a cold disk is most of it."""


def facts() -> dict[str, Any]:
    """The exact runtime: versions, GPUs, driver. OSError where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise OSError("torch sees no CUDA GPU")
    import triton
    import vllm

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,uuid,memory.total", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return {
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "triton": triton.__version__,
        "gpus": [line.strip() for line in driver.stdout.splitlines()],
        "capability": list(torch.cuda.get_device_capability()),
        "cores": os.cpu_count(),
    }


def kernels() -> dict[str, Any]:
    """The smallest calls of the extension: a sum of three parts and a gather, against torch; `exact` says whether."""
    import torch

    from afd_plugin.connectors import exchange_ops as ops

    ops.load_kernels()
    parts = torch.randn(3, 1000, device="cuda").to(torch.bfloat16)
    total = torch.empty_like(parts[0])
    ops.combine(total, [part.data_ptr() for part in parts])
    expected = parts.float().cumsum(0)[-1].to(torch.bfloat16)
    gathered = torch.empty(3, 1000, dtype=torch.bfloat16, device="cuda")
    ops.gather(gathered, [ops.Run(parts[i].data_ptr(), (2 - i) * 2000, 2000) for i in range(3)])
    return {"exact": bool(torch.equal(total, expected)) and bool(torch.equal(gathered, parts.flip(0)))}


QUESTIONS: Mapping[str, Callable[[], dict[str, Any]]] = {"facts": facts, "kernels": kernels}


def ask(question: str) -> dict[str, Any]:
    """The answer of a process that lives only for it; CommandError with its last output where it has none."""
    done = capture([sys.executable, "-m", "qualify.gpu.probe", question], timeout_s=LIMIT_S)
    # vLLM's log may stand before it
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main(words: Sequence[str]) -> int:
    """Print the answer as one line of JSON; 2 for a host that has none."""
    try:
        answer = QUESTIONS[words[0]]()
    except (ImportError, subprocess.SubprocessError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
