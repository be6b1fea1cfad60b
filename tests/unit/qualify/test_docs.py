# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from qualify import cells, docs, ledger, report, support
from qualify.docs import check_commands, pins, stale, write
from qualify.ledger import Counts, Entry
from qualify.phases import Phase, Status
from qualify.report import Evidence
from qualify.support import Claim, State, judged

README = "# Project\n\n<!-- generated: support -->\n<!-- end: support -->\n"
SESSIONS = frozenset({"unit", "gate", "docs"})
HELPS = {"demo": "--tensor-parallel-size --output", "serve": "--host"}


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, timeout=60)


def entry(session: str, status: Status, revision: str, shard: str = "") -> Entry:
    return Entry(
        cell="cpu", lock="l", revision=revision, environment="e", session=session, shard=shard,
        profile="qualifying" if shard else "landing",
        phase=Phase.STATIC_AND_UNIT_GATE, status=status, next_allowed_action="go on",
        blocker="none" if status is Status.PASS else "why", started="2026-01-01T00:00:00+00:00", seconds=1.0,
        counts=Counts(2, 2, 0, 0, 0, 0) if session in ("unit", "e2e") else None,
    )  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with cells, a README and current generated text."""
    for folder in ("containers", "docs", "evidence"):
        (tmp_path / folder).mkdir()
    (tmp_path / "containers" / "cells.toml").write_bytes(cells.CELLS.read_bytes())
    (tmp_path / "README.md").write_text(README)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    write(tmp_path)
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "-qm", "state")


def record(root: Path, session: str, status: Status = Status.PASS) -> None:
    ledger.append(entry(session, status, Evidence(root).revision), root / "evidence")


def test_generated_text_agrees_with_its_records(root: Path) -> None:
    assert list(stale(root)) == []
    record(root, "e2e")
    write(root)
    commit(root)
    assert list(stale(root)) == []
    page = (root / "README.md").read_text()
    assert "| cpu | landing | e2e PASS 2026-01-01 (landing, 2 of 2 cases) |" in page


def test_a_claim_made_by_hand_is_found(root: Path) -> None:
    for name in ("README.md", "docs/support.md"):
        page = (root / name).read_text()
        (root / name).write_text(page.replace("unvalidated", "validated", 1))
        assert [finding.path for finding in stale(root)] == [name]
        (root / name).write_text(page)


def test_text_older_than_the_committed_evidence_is_stale_and_evidence_of_a_running_chain_is_not(
    root: Path,
) -> None:
    record(root, "unit")
    assert list(stale(root)) == []
    commit(root)
    assert {finding.path for finding in stale(root)} == {"README.md", "docs/support.md"}
    assert all("older than the committed evidence of cpu" in finding.message for finding in stale(root))


def test_text_without_a_generated_part_is_found(root: Path) -> None:
    (root / "README.md").write_text("# Project\n\nEverything is validated.\n")
    assert [finding.path for finding in stale(root)] == ["README.md"]


@pytest.mark.parametrize(
    ("records", "state"),
    [
        ([], State.UNVALIDATED),
        ([("e2e", Status.PASS, "now")], State.LANDING),
        ([("e2e", Status.PASS, "old")], State.HISTORICAL),
        ([("e2e", Status.PASS, "old"), ("e2e", Status.FAIL, "now")], State.UNVALIDATED),
        ([("e2e", Status.FAIL, "now"), ("e2e", Status.PASS, "now")], State.LANDING),
        ([("unit", Status.PASS, "now")], State.UNVALIDATED),
        # one shard is not the session; a whole landing run is, until something of a later run fails
        ([("e2e", Status.PASS, "now", "1/2")], State.UNVALIDATED),
        ([("e2e", Status.PASS, "now", "2/2"), ("e2e", Status.PASS, "now", "1/2")], State.VALIDATED),
        ([("e2e", Status.PASS, "now", "1/2"), ("e2e", Status.PASS, "old", "2/2")], State.UNVALIDATED),
        ([("e2e", Status.PASS, "old"), ("e2e", Status.PASS, "now", "1/2")], State.HISTORICAL),
        ([("e2e", Status.PASS, "now"), ("e2e", Status.PASS, "now", "1/2")], State.LANDING),
        ([("e2e", Status.PASS, "now"), ("e2e", Status.FAIL, "now", "1/2")], State.UNVALIDATED),
        (
            [("e2e", Status.FAIL, "now", "1/2"), ("e2e", Status.PASS, "now", "2/2")],
            State.UNVALIDATED,
        ),
        (
            [("e2e", Status.FAIL, "now", "1/2"), *(("e2e", Status.PASS, "now", f"{n}/2") for n in (1, 2))],
            State.UNVALIDATED,
        ),
        # a failure of a qualifying run stands, whatever a landing run says after it
        ([("e2e", Status.FAIL, "now", "1/2"), ("e2e", Status.PASS, "now")], State.UNVALIDATED),
    ],
)
def test_a_claim_is_what_its_records_make_it(records: list[tuple[Any, ...]], state: State) -> None:
    made: list[ledger.Record] = []
    for one in records:
        made.append(ledger.chained(entry(*one), made[-1] if made else None))
    claim = Claim("2", "text", ("cpu",), ("e2e",))
    assert judged(claim, made, "now")[0] is state


def test_a_run_in_shards_is_cited_with_the_cases_of_all_and_a_part_of_it_with_what_there_is() -> None:
    made: list[ledger.Record] = []
    for shard in ("1/2", "2/2"):
        made.append(ledger.chained(entry("e2e", Status.PASS, "now", shard), made[-1] if made else None))
    claim = Claim("2", "text", ("cpu",), ("e2e",))
    assert judged(claim, made, "now")[1] == "e2e PASS 2026-01-01 (qualifying, 4 of 4 cases)"
    assert judged(claim, made[:1], "now") == (State.UNVALIDATED, "e2e: 1 of 2 shards")


def test_what_is_refused_is_unsupported_whatever_the_records_say() -> None:
    matrix = support.rows({}, {})
    assert State.UNSUPPORTED in {row.state for row in matrix}
    assert all(row.state is not State.VALIDATED for row in matrix)


def test_the_page_is_self_contained_and_escapes_what_it_shows(root: Path) -> None:
    ledger.append(entry("lint", Status.FAIL, "<b>"), root / "evidence")
    page = report.html(Evidence(root))
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "://" not in page
    assert "src=" not in page


def test_an_unsound_ledger_is_named_and_counts_for_nothing(root: Path) -> None:
    record(root, "unit")
    path = ledger.path_of("cpu", root / "evidence")
    path.write_bytes(path.read_bytes().replace(b"PASS", b"FAIL"))
    evidence = Evidence(root)
    assert "The ledger is not sound: cpu.jsonl:1" in report.markdown(evidence)
    assert "The ledger is not sound" in report.html(evidence)


def test_another_version_than_the_cells_is_found_and_history_may_name_it() -> None:
    pages = {
        "README.md": "vLLM 0.28.0, `vllm==0.28.0`\nvLLM 0.27.1 and torch==2.12.0\n",
        "docs/upgrades/a.md": "vLLM 0.26.0",
    }
    found = list(pins(pages, "0.28.0", "2.13.0+cu130"))
    assert [(f.path, f.line) for f in found] == [("README.md", 2), ("README.md", 2)]


@pytest.mark.parametrize(
    "line",
    ["nox -s unit docs", "nox -s unit -- tests -k nothing", "python -m qualify.gate --cell cpu", "afd demo --output x",
     "afd serve MODEL --vllm-option", "curl x", "python -m pip install nox"],
)  # fmt: skip
def test_a_command_that_exists_passes(line: str) -> None:
    assert list(check_commands({"a.md": f"```sh\n{line}\n```\nand `{line}`\n"}, SESSIONS, HELPS)) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nox -s unit party", "no session is called party"),
        ("true && nox -s party", "no session is called party"),
        ("python -m qualify.party", "no module is called qualify.party"),
        ("python -m qualify.party.time", "no module is called"),
        ("afd party MODEL", "`afd` has no command party"),
        ("afd demo --party", "has no option --party"),
    ],
)
def test_a_command_that_does_not_exist_is_found_on_its_line(line: str, said: str) -> None:
    found = list(check_commands({"a.md": f"text\n\n```sh\ncd x\n{line}\n```\n"}, SESSIONS, HELPS))
    assert [(f.line, f.rule) for f in found] == [(5, "command")]
    assert said in found[0].message


def test_the_commands_help_texts_are_read() -> None:
    helps = docs.help_texts()
    assert {"serve", "attention", "ffn", "demo"} <= set(helps)
    assert "--" in helps["demo"]
