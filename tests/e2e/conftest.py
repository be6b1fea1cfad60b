# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from afd_plugin.demo.checkpoints import make_all
from qualify.sharding import chosen
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full` adds the long matrices; `--shard K/N` keeps one of N parts, divided by time as the gate does."""
    parser.addoption("--full", action="store_true", help="run what is marked full, too")
    parser.addoption("--shard", default="", help="K/N: part K of N parts that take about as long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if config.getoption("--full") or item.get_closest_marker("full") is None]
    mine = chosen([item.nodeid for item in wanted], config.getoption("--shard"))
    kept = [item for item in wanted if item.nodeid in mine]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
