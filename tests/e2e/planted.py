# SPDX-License-Identifier: Apache-2.0
"""An FFN whose unit k raises once a file exists: `python -m tests.e2e.planted AFD_JSON MODEL ...` as `ffn_main`.

`afd ffn` starts no other worker class than its own, so this child is started beside a launcher, not below one.
"""

import os
import sys
from pathlib import Path

import torch
from vllm.platforms import current_platform

from afd_plugin.cli import child, ffn_main
from afd_plugin.config import Role
from afd_plugin.plan import RemoteUnit
from afd_plugin.v1.worker.cpu_ffn_worker import CPUAFDFFNWorker
from afd_plugin.v1.worker.ffn_service import FFNService

WHEN = "AFD_E2E_FAIL_WHEN"
AT = "AFD_E2E_FAIL_AT"


class FailingService(FFNService):
    """Computes until the file exists, then raises at its unit."""

    def _compute(self, unit: RemoteUnit, hidden: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        if unit.index == int(os.environ[AT]) and Path(os.environ[WHEN]).exists():
            raise FloatingPointError(f"planted at unit {unit.index}")
        return super()._compute(unit, hidden, logits)


class FailingFFNWorker(CPUAFDFFNWorker):
    """The CPU lane's FFN worker with that service."""

    service_class = FailingService


def main() -> int:
    """Run the FFN child with the planted class in the place of its own."""
    classes = {
        **child.WORKER_CLASSES,
        (Role.FFN, current_platform.device_type): "tests.e2e.planted.FailingFFNWorker",
    }
    child.WORKER_CLASSES = classes
    return child.run_child(ffn_main.serve, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
