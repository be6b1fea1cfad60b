# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from afd_plugin.demo.checkpoints import make_all
from tests.e2e.harness import environment
from tests.e2e.zygote import Zygote


@pytest.fixture(scope="session")
def checkpoints() -> dict[str, Path]:
    return make_all()


@pytest.fixture(scope="session")
def python() -> Iterator[Path]:
    """An executable that starts Python processes with vLLM already imported."""
    with Zygote(environment()) as zygote:
        yield zygote.python
