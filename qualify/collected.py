# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that writes down what pytest collected and how each case ended, in pytest's own words.

The gate loads it with `-p qualify.collected` in PYTEST_ADDOPTS. AFD_GATE_CASES is the file to write, and
AFD_GATE_SHARD (`2/3`) the part of the suite to run.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from qualify.expected import Run
from qualify.sharding import chosen

CASES = "AFD_GATE_CASES"
SHARD = "AFD_GATE_SHARD"
_RANK = {"passed": 0, "xpassed": 1, "skipped": 2, "xfailed": 3, "failed": 4, "error": 5}


def outcome(report: pytest.TestReport) -> str:
    """One word for one phase (setup, call, teardown) of a case."""
    if "wasxfail" in report.__dict__:
        return "xpassed" if report.passed else "xfailed"
    if report.failed and report.when != "call":
        return "error"
    return report.outcome


class Collector:
    """Gathers over one pytest session; the worst word of a case's phases is the case's."""

    def __init__(self, target: Path, shard: str) -> None:
        self._target, self._shard = target, shard
        self._collected: tuple[str, ...] = ()
        self._deselected: list[str] = []
        self._broken: list[str] = []
        self._outcomes: dict[str, str] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the cases of this shard."""
        mine = chosen([item.nodeid for item in items], self._shard)
        other = [item for item in items if item.nodeid not in mine]
        if other:
            items[:] = [item for item in items if item.nodeid in mine]
            config.hook.pytest_deselected(items=other)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Remember what was left out, by this plugin or by an option."""
        self._deselected += [item.nodeid for item in items]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember what will run."""
        self._collected = tuple(item.nodeid for item in session.items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember what could not be collected, or was skipped as a whole."""
        if not report.passed:
            self._broken.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the worst of setup, call and teardown."""
        word = outcome(report)
        if _RANK[word] >= _RANK[self._outcomes.get(report.nodeid, "passed")]:
            self._outcomes[report.nodeid] = word

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write it all."""
        run = Run(
            collected=self._collected,
            deselected=tuple(self._deselected),
            broken=tuple(self._broken),
            outcomes=self._outcomes,
            exit_status=int(exitstatus),
        )
        self._target.write_bytes(msgspec.json.encode(run, order="sorted"))


def pytest_configure(config: pytest.Config) -> None:
    """Register the collector where the gate asked for it."""
    if target := os.environ.get(CASES):
        # a pytest that a test starts itself must not write over this one's file
        del os.environ[CASES]
        config.pluginmanager.register(Collector(Path(target), os.environ.pop(SHARD, "")))
