# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from qualify.accuracy.checkpoints import all_checked
from tests.e2e.conftest import python  # noqa: F401 (a fixture)


@pytest.fixture(scope="session")
def trained() -> dict[str, Path]:
    """The trained checkpoints by name, each what its record says."""
    return all_checked()
