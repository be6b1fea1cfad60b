# SPDX-License-Identifier: Apache-2.0
"""An FFN whose worker kills itself on order: `python -m tests.e2e.dying ffn AFD_JSON MODEL ...` as `ffn_main`,
`python -m tests.e2e.dying serve ...` as `afd serve` with such an FFN.

Orders are files in the folder that `AFD_E2E_DEATHS` names, carried out in the order of their names and removed just
before the worker dies, so that a successor goes on with the next one.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from afd_plugin.cli import app, child, ffn_main, launch
from afd_plugin.config import Role
from afd_plugin.plan import Exchange, RemoteUnit
from afd_plugin.v1.worker.cpu_ffn_worker import CPUAFDFFNWorker
from afd_plugin.v1.worker.ffn_service import FFNService

DEATHS = "AFD_E2E_DEATHS"
LOOK_S = 0.05


@dataclass(frozen=True)
class Death:
    """When to die.

    `moment` is `received` (all rows of the unit are here, nobody has an answer), `answering` (the first lane has its
    answer, no other lane has) or `now`. `least` and `most` are rows of the step to die in.
    """

    unit: int = 0
    moment: str = "received"
    least: int = 1
    most: int = 1 << 30

    def order(self, folder: Path, name: str) -> Path:
        """Write the order; it is carried out once the file is gone."""
        path = folder / f"{name}.json"
        path.with_suffix(".partial").write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path.with_suffix(".partial").rename(path)


def die_if(moment: str, unit: int = 0, rows: int = 1) -> None:
    """Carry out the next order if this is its moment."""
    for path in sorted(Path(os.environ[DEATHS]).glob("*.json"))[:1]:
        try:
            death = Death(**json.loads(path.read_text(encoding="utf-8")))
            if (death.moment, death.unit) != (moment, unit) or not death.least <= rows <= death.most:
                return
            path.unlink()
        except FileNotFoundError:  # another rank has taken the order
            return
        os.kill(os.getpid(), signal.SIGKILL)


class HalfAnswering:
    """The FFN's connector, which may answer one lane only before the worker dies."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def send_output(self, exchange: Exchange, rows: Sequence[int], output: torch.Tensor) -> None:
        first = (rows[0], *(0 for _ in rows[1:]))
        self._connector.send_output(exchange, first, output[: rows[0]])
        die_if("answering", exchange.unit, sum(rows))
        self._connector.send_output(exchange, (0, *rows[1:]), output[rows[0] :])


class DyingService(FFNService):
    """Computes until it is told to die."""

    def serve(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        if self._connector is not None:
            self._connector = HalfAnswering(self._connector)
        super().serve()

    def _watch(self) -> None:
        while True:
            die_if("now")
            time.sleep(LOOK_S)

    def _compute(self, unit: RemoteUnit, hidden: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        die_if("received", unit.index, hidden.shape[0])
        return super()._compute(unit, hidden, logits)


class DyingFFNWorker(CPUAFDFFNWorker):
    """The CPU lane's FFN worker with that service."""

    service_class = DyingService


def main() -> int:
    """Run the FFN child with the planted class in the place of its own, or `afd` with such a child."""
    if sys.argv[1] != "ffn":
        command = launch._command

        def planted(options: Any, role: Role, *rest: Any) -> tuple[str, ...]:
            found = command(options, role, *rest)
            return (found[0], "-m", "tests.e2e.dying", "ffn", *found[3:]) if role is Role.FFN else found

        launch._command = planted
        return app.run(sys.argv[1:])
    child.WORKER_CLASSES = {
        **child.WORKER_CLASSES,
        (Role.FFN, current_platform.device_type): "tests.e2e.dying.DyingFFNWorker",
    }
    return child.run_child(ffn_main.serve, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
