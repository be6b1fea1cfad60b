# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from qualify.upgrade import __main__ as commands
from qualify.upgrade import decisions
from tests.unit.upgrade import world


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AFD_UPSTREAM_DIR", str(tmp_path))
    world.wheel(tmp_path, world.OLD, "0.26.0")
    world.wheel(tmp_path, world.NEW, "0.28.0")
    return tmp_path


def test_without_its_decision_the_real_conflict_blocks_and_both_values_are_printed(
    wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["audit", "0.26.0", "0.28.0", "--no-decisions"]) == 1
    text = capsys.readouterr().out
    assert "FREEZE_IDENTITY | BLOCKED" in text
    assert "`ffd46bfab`" in text
    assert "`568afb3a13806beb53bb2e6bd518269357b237c0`" in text
    assert "## Difference" not in text


def test_the_recorded_decisions_are_readable_and_about_this_upgrade() -> None:
    recorded = decisions.load(commands.ROOT / decisions.FOLDER)
    values = frozenset({"ffd46bfab", "568afb3a13806beb53bb2e6bd518269357b237c0"})
    assert decisions.for_identity(recorded, "commit of vLLM 0.26.0", values) is not None
    assert decisions.covering(recorded, "0.26.0 to 0.28.0", "engine-core-init") is not None


def test_lookahead_writes_one_report(wheels: Path) -> None:
    output = wheels / "report.md"
    found = commands.main(["lookahead", "0.28.0", "--current", "0.26.0", "--output", str(output)])
    assert found == 0
    assert output.read_text(encoding="utf-8").startswith("# Lookahead: vLLM 0.26.0 to 0.28.0")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["lookahead", "newest"], "no exact vLLM release"),
        (["audit", "0.26.0", "0.28.0", "--task", "missing.toml"], "missing.toml"),
        (["align", "stay"], "a review needs --latest, --reason, --decided-by"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_a_sentence(
    wheels: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert commands.main(arguments) == 2
    assert word in capsys.readouterr().err


def test_align_records_and_says_when_the_next_review_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.write(tmp_path, world.PROJECT)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    assert commands.main(["align", "--due"]) == 1
    taken = ["align", "stay", "--latest", "0.30.0", "--reason", "no need", "--decided-by", "who"]
    assert commands.main(taken) == 0
    assert "docs/upgrades/decisions/" in capsys.readouterr().out
    assert commands.main(["align", "--due"]) == 0
    assert commands.main(taken) == 2
