# SPDX-License-Identifier: Apache-2.0
"""Collecting needs no GPU, so that the list of cases can be renewed anywhere; running without the cell is refused."""

from __future__ import annotations

import pytest

from qualify.gpu.cell import CELLS, refusal


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run what is marked full, too")
    parser.addoption(
        "--gpus", type=int, default=1, help="GPUs of the cell; cases that need more are left out"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(count): needs a cell of so many GPUs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus = config.getoption("--gpus")

    def wanted(item: pytest.Item) -> bool:
        marks = [int(mark.args[0]) for mark in item.iter_markers("gpus")]
        fits = max(marks, default=1) <= gpus
        return fits and (config.getoption("--full") or item.get_closest_marker("full") is None)

    kept = [item for item in items if wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtestloop(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    gpus = session.config.getoption("--gpus")
    cell = next(cell for cell in CELLS.values() if cell.devices == gpus)
    reason = refusal(cell)
    if reason is not None:
        pytest.exit(reason, returncode=2)
