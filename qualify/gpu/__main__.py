# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m qualify.gpu PART... --out FOLDER`.

A part that ends with `passed: false`, or by an exception, makes the exit status 1; a host that is not the cell, 2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from qualify.gpu import faults, mps, parity, parts
from qualify.gpu.cell import CELLS, refusal
from qualify.gpu.host import Host

PARTS: dict[str, Callable[[Host], Any]] = {
    "control": parts.control,
    "contract": parts.contract,
    "exchange": parts.exchange,
    "parity": parity.parity,
    "bench": parts.bench,
    "faults": faults.faults,
    "endurance": faults.endurance,
}


def host_facts() -> dict[str, Any]:
    """The exact runtime: versions, GPU, driver."""
    import torch
    import vllm

    if not torch.cuda.is_available():
        raise OSError("torch sees no CUDA GPU")
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,uuid,memory.total", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    import triton

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m qualify.gpu", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS])
    parser.add_argument("--cell", default="h200x1", choices=[*CELLS], help="what this host must be")
    parser.add_argument("--out", type=Path, required=True, help="folder for the evidence")
    parser.add_argument("--logs", type=Path, help="folder for the logs of all engines")
    parser.add_argument("--no-mps", action="store_true", help="do not start the MPS daemon")
    parser.add_argument(
        "--budget", type=float, default=540, help="seconds; parts stop starting new work before it ends"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=JSON", help="settings of a part"
    )
    options = parser.parse_args(arguments)
    reason = refusal(CELLS[options.cell])
    if reason is not None:
        print(f"gpu: {reason}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="afd-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    settings = {
        name: json.loads(value) for name, _, value in (text.partition("=") for text in options.option)
    }
    failed = False
    with ExitStack() as stack:
        # before this process touches the GPU: a process outside MPS would take time slices from those inside
        with_mps = False if options.no_mps else stack.enter_context(mps.daemon())
        try:
            facts = {**host_facts(), "mps": with_mps}
        except (ImportError, subprocess.SubprocessError, OSError) as error:
            print(f"gpu: this host is not the cell {options.cell}: {error}", file=sys.stderr)
            return 2
        host = Host(logs, time.monotonic() + options.budget, settings)
        for name in options.parts:
            started = time.monotonic()
            asked = [word for option in options.option for word in ("--option", option)]
            evidence: dict[str, Any] = {
                "part": name,
                "host": facts,
                "command": ["python", "-m", "qualify.gpu", name, "--out", "FOLDER", *asked],
            }
            try:
                evidence["result"] = PARTS[name](host)
            except Exception as error:  # noqa: BLE001 - the part's outcome, written down and shown
                failed = True
                evidence["error"] = f"{type(error).__name__}: {error}"[-6000:]
                traceback.print_exc()
            evidence["seconds"] = round(time.monotonic() - started, 1)
            path = options.out / f"{name}.json"
            path.write_text(json.dumps(evidence, indent=1) + "\n")
            print(f"gpu: {name} took {evidence['seconds']} s, see {path}", flush=True)
            result = evidence.get("result")
            failed = failed or (isinstance(result, dict) and result.get("passed") is False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
