# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from qualify.upgrade.assess import Comparison
from qualify.upgrade.changes import diff
from tests.unit.upgrade import world


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("trees")
    old = world.tree(root / "old", world.OLD, "0.26.0", "ffd46bfab")
    new = world.tree(root / "new", world.NEW, "0.28.0", "2cf0a6915")
    return Comparison(old, new, diff(old, new, workers=1))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return world.write(tmp_path / "project", world.PROJECT)
