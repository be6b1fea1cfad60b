# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qualify.audit.__main__ import Audit, run
from tests.unit.audit import tree


@pytest.fixture(scope="session")
def checker_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


@pytest.fixture
def audited(tmp_path: Path, checker_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Audit]:
    """Run the whole audit over the stand-in, with further modules of ours."""

    def audit(traces: tuple[Path, ...] = (), **modules: str) -> Audit:
        upstream = tree.upstream(tmp_path)
        config = tmp_path / "pyproject.toml"
        config.write_text("[tool.mypy]\nstrict = true\n", encoding="utf-8")
        monkeypatch.setenv("MYPYPATH", str(tmp_path))
        ours = tree.package(tmp_path, **modules)
        return run(upstream, ours, tree.registry(upstream), config=config, cache=checker_cache, traces=traces)

    return audit
