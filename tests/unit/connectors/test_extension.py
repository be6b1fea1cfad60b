# SPDX-License-Identifier: Apache-2.0
"""The package without its CUDA extension: it says what is lost, where it matters, and works otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import afd_plugin
from afd_plugin.cli.preflight import Verdict, check_extension
from afd_plugin.connectors import extension
from afd_plugin.errors import ConfigRefused


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "EXTENSION", "afd_plugin._never_built")


def test_only_the_connector_that_needs_it_is_refused_and_the_sentence_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch)
    for name in ("GlooAFDConnector", "P2pNcclAFDConnector"):
        extension.check_connector(name)
    with pytest.raises(ConfigRefused) as refused:
        extension.check_connector("CudaIpcAFDConnector")
    for word in (
        "is not built here",
        "CudaIpcAFDConnector is lost",
        "qualify.csrc build",
        "P2pNcclAFDConnector",
    ):
        assert word in str(refused.value)


def test_loading_refuses_by_the_same_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    with pytest.raises(ConfigRefused, match="everything else works"):
        extension.load()


def test_the_check_of_a_host_fails_only_where_roles_must_share_a_gpu() -> None:
    assert check_extension(built=False, needed=True).verdict is Verdict.FAIL
    assert check_extension(built=False, needed=False).verdict is Verdict.NOTE
    assert check_extension(built=True, needed=True).verdict is Verdict.OK


def test_a_copy_of_the_package_without_it_imports_and_answers(tmp_path: Path) -> None:
    """What a wheel installs: the same files but for the extension."""
    source = Path(afd_plugin.__file__).parent
    target = tmp_path / "afd_plugin"
    for path in source.rglob("*.py"):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    code = (
        "import afd_plugin, sys; from afd_plugin.connectors import extension; "
        "assert afd_plugin.__file__.startswith(sys.argv[1]); assert 'torch' not in sys.modules; "
        "print(extension.is_built())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"
