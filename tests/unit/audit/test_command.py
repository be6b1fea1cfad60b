# SPDX-License-Identifier: Apache-2.0
"""The audit as a command: what it prints for a maintainer, what it writes, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from afd_plugin.seams import REGISTRY
from qualify.audit import __main__ as command
from qualify.audit import record
from qualify.audit.__main__ import Audit

Audited = Callable[..., Audit]

PLANTED = """
from vllm.registry import loaders, register_loader
from vllm.worker import FastWorker

class Faster(FastWorker):
    def hurry(self) -> None:
        self.rank = 2
"""


def test_skeletons_are_proposed_for_exactly_what_is_not_registered(audited: Audited) -> None:
    """A subclass and an override become seams with signature and digest, plain names a surface of their owner."""
    audit = audited(extra=PLANTED)
    text = "\n".join(record.propose(audit.coverage.uncovered, audit.upstream))
    for symbol, kind in (
        ("vllm.worker:FastWorker", "SUBCLASS"),
        ("vllm.worker:FastWorker.hurry", "OVERRIDE"),
    ):
        assert f"symbol='{symbol}',\n    kind=SeamKind.{kind}," in text
    assert "owner='vllm.registry:'" in text
    assert "'loaders': '" in text
    assert "# used in plug/extra.py" in text
    assert "ParallelConfig" not in text, "what is registered needs no skeleton"
    assert list(record.propose((), audit.upstream)) == []


def test_the_command_prints_the_findings_writes_the_report_and_fails_for_one(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 with a finding, 0 without; the report holds every use by entry and the seconds of each check."""
    clean = audited()
    audits = [audited(extra=PLANTED), clean]
    monkeypatch.setattr(command, "run", lambda *_, **__: audits.pop(0))
    target = tmp_path / "report.json"
    assert command.main(["--json", str(target), "--propose"]) == 1
    said = capsys.readouterr().out
    assert "plug/extra.py" in said
    assert "Seam(" in said
    report = json.loads(target.read_text(encoding="utf-8"))
    assert report["patch_count"] == report["copied_functions"] == 0
    assert {finding["rule"] for finding in report["findings"]} == {"unregistered"}
    assert any("plug/worker.py" in use for use in report["uses"]["worker-init-device"])
    assert report["seconds"].keys() >= {"drift", "imports", "patches", "copies"}
    assert command.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("findings 0")


@pytest.mark.vllm
def test_the_registry_holds_what_is_recorded_for_the_installed_vllm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--drift` finds nothing, and `--record` prints an entry's own digest."""
    assert command.main(["--drift"]) == 0
    assert "0 of the registry's entries have drifted" in capsys.readouterr().out
    seam, surface = REGISTRY.seams[0], REGISTRY.surfaces[0]
    assert command.main(["--record", seam.id]) == 0
    assert f"sha256={seam.sha256!r}" in capsys.readouterr().out
    assert command.main(["--record", surface.id]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name!r}: {digest!r}," in printed for name, digest in surface.names.items())


def test_what_cannot_be_audited_is_told_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without vLLM, and an entry that nobody has."""
    assert command.main(["--vllm-root", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert command.main(["--record", "no-such-entry"]) == 2
    assert "no entry is called no-such-entry" in capsys.readouterr().err
