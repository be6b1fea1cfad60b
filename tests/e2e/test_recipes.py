# SPDX-License-Identifier: Apache-2.0
"""The recipes' commands run as written, in the order in which they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from afd_plugin.supervisor.ports import PortReservation
from tests.e2e.harness import environment
from tests.e2e.teardown import nothing_left

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_cpu_recipe_runs_as_written(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "recipes" / "cpu-1a1f.md").read_text(encoding="utf-8"))
    assert len(blocks) == 5
    with PortReservation() as http, PortReservation() as rendezvous:
        variables = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PORT": str(http.port),
            "RENDEZVOUS_PORT": str(rendezvous.port),
        }
    try:
        with nothing_left(tmp_path) as traces, (tmp_path / "recipe.log").open("wb") as log:
            variables |= traces.environment
            subprocess.run(
                ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)],
                env=environment(variables),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=400,
            )
    except subprocess.CalledProcessError as error:
        tail = (tmp_path / "recipe.log").read_text(encoding="utf-8", errors="replace")[-4000:]
        pytest.fail(f"the recipe ended with {error.returncode}:\n{tail}")
