# SPDX-License-Identifier: Apache-2.0
"""The import contracts of pyproject.toml, tried on a small package with planted faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qualify.process import capture

ROOT = Path(__file__).resolve().parents[3]
MODULES = (
    "cli",
    "config",
    "connectors",
    "control",
    "demo",
    "errors",
    "model",
    "plan",
    "report",
    "supervisor",
    "topology",
    "v1",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package with this project's modules, all empty, under this project's contracts."""
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    for name in ("", *MODULES):
        module = tmp_path / "afd_plugin" / name / "__init__.py"
        module.parent.mkdir(exist_ok=True)
        module.touch()
    return tmp_path


def _broken(project: Path) -> str:
    """The names of the contracts that `project` breaks, with what import-linter says of each."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = capture([sys.executable, "-c", code], cwd=project, check=False)
    _, _, details = done.stdout.partition("Broken contracts")
    assert bool(details) == bool(done.returncode), done.stdout + done.stderr
    return details


def test_the_contracts_accept_a_package_without_imports(project: Path) -> None:
    assert _broken(project) == ""


@pytest.mark.parametrize(
    ("module", "planted", "said"),
    [
        ("errors", "import afd_plugin.config", "layers"),
        ("plan", "import afd_plugin.topology", "layers"),
        ("model", "import afd_plugin.connectors", "layers"),
        ("connectors", "import afd_plugin.control", "layers"),
        ("control", "import afd_plugin.v1", "layers"),
        ("v1", "import afd_plugin.cli", "layers"),
        ("config", "import torch", "pure core"),
        ("topology", "def f():\n    import vllm.config", "pure core"),
        ("control", "import vllm", "know no vLLM"),
        ("supervisor", "from torch import nn", "know no vLLM"),
        ("connectors", "import zmq", "knows zmq"),
    ],
)
def test_each_planted_import_is_refused(project: Path, module: str, planted: str, said: str) -> None:
    (project / "afd_plugin" / module / "__init__.py").write_text(planted + "\n")
    assert said in _broken(project)


def test_a_module_without_a_layer_is_refused(project: Path) -> None:
    (project / "afd_plugin" / "helpers.py").touch()
    assert "helpers" in _broken(project)
