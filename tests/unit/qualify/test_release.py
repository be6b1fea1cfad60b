# SPDX-License-Identifier: Apache-2.0
"""Release and final audit over a small real checkout: real git, real tags, a real ledger, planted faults."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from qualify import __main__ as command
from qualify import (
    cells,
    docs,
    expected,
    final_audit,
    identity,
    ledger,
    package,
    release,
    revision,
    sbom,
    sharding,
    verify,
)
from qualify.cells import load
from qualify.chain import Part, Profile, parts
from qualify.identity import Binding
from qualify.ledger import Counts, Entry
from qualify.phases import Phase, Status

CASES = {"tests/unit/a.py::test_one": 3, "tests/e2e/b.py::test_two": 1}


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(
        ["git", *who, *words], cwd=root, check=True, capture_output=True, timeout=60, text=True
    )
    return done.stdout


def commit(root: Path, message: str = "state") -> None:
    git(root, "add", ".")
    git(root, "commit", "-qm", message)


def chain(root: Path, binding: Binding) -> None:
    """A whole qualifying chain in the ledger."""
    for part in (Part("", Phase.FREEZE_IDENTITY), *parts(load("cpu"), Profile.QUALIFYING)):
        wanted = sharding.of_shard(CASES, part.shard)
        number = sum(wanted.values())
        entry = Entry(
            cell="cpu", lock=binding.lock, revision=binding.revision, environment=binding.environment,
            profile="qualifying", session=part.session, shard=part.shard, phase=part.phase, status=Status.PASS,
            next_allowed_action="go on", started="2026-01-01T00:00:00+00:00", seconds=1.0,
            counts=Counts(number, number, 0, 0, 0, 0) if part.suite else None,
            expected=expected.digest(wanted) if part.suite else None,
        )  # fmt: skip
        ledger.append(entry, root / "evidence")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout that can be released: evidence, generated text, artifacts, an annotated tag with the head."""
    for name in (
        "containers/cells.toml",
        *load("cpu").locks,
        "containers/light/requirements.lock",
        "pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((cells.ROOT / name).read_bytes())
    for folder in ("docs", "evidence", "dist", expected.DIRECTORY):
        (tmp_path / folder).mkdir(parents=True)
    for suite in ("unit", "e2e_all"):
        (tmp_path / expected.DIRECTORY / f"{suite}.txt").write_text(expected.render(CASES))
    (tmp_path / "README.md").write_text("<!-- generated: support -->\n<!-- end: support -->\n")
    (tmp_path / ".gitignore").write_text("/dist/\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    lock = load("cpu").lock_digest(tmp_path)
    chain(tmp_path, Binding("cpu", lock, revision.revision(tmp_path), "environment"))
    docs.write(tmp_path)
    commit(tmp_path, "evidence")
    for name in ("afd_plugin-0.28.0-py3-none-any.whl", "afd_plugin-0.28.0.tar.gz"):
        (tmp_path / "dist" / name).write_text(name)
    release.finish_artifacts(tmp_path)
    tag(tmp_path)
    return tmp_path


def tag(root: Path, head: str | None = None, name: str = "v0.28.0") -> None:
    head = head or ledger.read("cpu", root / "evidence")[-1].hash
    git(root, "tag", "-f", "-a", name, "-m", f"release\n\nevidence-head cpu: {head}")


def test_a_tag_with_whole_evidence_can_be_released_and_nothing_is_pushed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.check("v0.28.0", root) == ()
    monkeypatch.setattr(release, "check", lambda name: ())
    assert release.main(["v0.28.0"]) == 0
    assert "Nothing was pushed; this does it:\n  git push origin v0.28.0" in capsys.readouterr().out


def test_a_dirty_tree_is_refused(root: Path) -> None:
    (root / "new.py").write_text("x = 1\n")
    assert release.check("v0.28.0", root) == ("dirty tree: new.py",)


def test_evidence_and_generated_text_that_are_not_in_the_tag_are_refused(root: Path) -> None:
    """What is judged here is what is published there: renewed text, records of another cell, evidence staged only."""
    head = ledger.read("cpu", root / "evidence")[-1].hash
    ran = ledger.read("cpu", root / "evidence")[-1].entry
    for entry in (msgspec.structs.replace(ran, session=name, environment="b") for name in ("", "lint")):
        ledger.append(msgspec.structs.replace(entry, profile="landing"), root / "evidence")
    docs.write(root)
    git(root, "add", "evidence")
    (root / "evidence" / "stray.json").touch()
    tag(root, head)
    said = release.check("v0.28.0", root)
    assert len(said) == 1
    named = said[0].removeprefix("not committed, so not in the tag: ").partition(";")[0].split(", ")
    assert sorted(named) == ["README.md", "docs/support.md", "evidence/cpu.jsonl", "evidence/stray.json"]


def test_a_wrong_a_missing_and_a_light_tag_are_refused(root: Path) -> None:
    assert "there is no tag v0.28.1" in release.check("v0.28.1", root)
    assert "the tag is v0.28.1, the version wants v0.28.0" in release.check("v0.28.1", root)
    git(root, "tag", "-f", "v0.28.0")
    assert any("not an annotated tag" in line for line in release.check("v0.28.0", root))
    tag(root)
    (root / "code.py").write_text("x = 1\n")
    commit(root)
    assert any("v0.28.0 is on" in line for line in release.check("v0.28.0", root))


def test_missing_cut_and_foreign_evidence_is_refused(root: Path) -> None:
    path = ledger.path_of("cpu", root / "evidence")
    content = path.read_bytes()
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))
    assert any("no record has the attested head" in line for line in release.check("v0.28.0", root))
    path.unlink()
    assert any("no record has the attested head" in line for line in release.check("v0.28.0", root))
    path.write_bytes(content)
    (root / "code.py").write_text("x = 1\n")
    commit(root)
    tag(root)
    said = release.check("v0.28.0", root)
    assert any("is of this revision" in line and line.endswith("foreign") for line in said)
    assert any("docs/support.md is not of this revision" in line for line in said)
    git(root, "tag", "-f", "-a", "v0.28.0", "-m", "no head")
    assert any("carries no line `evidence-head cpu" in line for line in release.check("v0.28.0", root))


def test_a_diagnosis_in_another_environment_takes_no_release_and_a_failure_there_does(root: Path) -> None:
    """The qualifying chain is judged in its own environment, its failures are in any, and after the head."""
    ran = ledger.read("cpu", root / "evidence")[-1].entry
    opening = msgspec.structs.replace(
        ran, environment="another", profile="landing", session="", phase=Phase.FREEZE_IDENTITY
    )
    head = ledger.append(opening, root / "evidence").hash
    docs.write(root)
    commit(root, "a diagnosis")
    tag(root, head)
    assert release.check("v0.28.0", root) == ()

    opening = msgspec.structs.replace(opening, profile="qualifying")
    failed = msgspec.structs.replace(
        opening, session="lint", phase=Phase.STATIC_AND_UNIT_GATE, status=Status.FAIL, blocker="style"
    )
    for entry in (opening, failed):
        ledger.append(entry, root / "evidence")
    docs.write(root)
    commit(root, "a failure")
    tag(root, head)
    assert release.check("v0.28.0", root) == ("lint failed at this revision: it stands",)


def test_the_ledger_of_another_cell_is_attested_and_held_to_its_history_too(root: Path) -> None:
    """What the documents say of a GPU is read from it."""
    ran = ledger.read("cpu", root / "evidence")[-1].entry
    for entry in (msgspec.structs.replace(ran, cell="h200x1", session=name) for name in ("", "gpu_e2e")):
        ledger.append(entry, root / "evidence")
    docs.write(root)
    commit(root, "evidence of a GPU")
    tag(root)
    assert release.check("v0.28.0", root) == ("the tag carries no line `evidence-head h200x1: HASH`",)
    heads = {name: ledger.read(name, root / "evidence")[-1].hash for name in ("cpu", "h200x1")}
    message = "\n".join(f"evidence-head {name}: {head}" for name, head in heads.items())
    git(root, "tag", "-f", "-a", "v0.28.0", "-m", message)
    assert release.check("v0.28.0", root) == ()

    path = ledger.path_of("h200x1", root / "evidence")
    path.unlink()
    ledger.append(msgspec.structs.replace(ran, cell="h200x1", session="", seconds=2.0), root / "evidence")
    docs.write(root)
    commit(root, "hashed anew")
    git(root, "tag", "-f", "-a", "v0.28.0", "-m", message)
    said = release.check("v0.28.0", root)
    assert "h200x1.jsonl does not end in the head that the tag carries" in said
    assert any("it was rewritten or cut" in line for line in said)


def test_the_artifacts_are_exactly_those_that_are_published(root: Path) -> None:
    (root / "dist" / "stray.whl").write_text("x")
    (root / "dist" / "afd_plugin-0.28.0.tar.gz").write_text("other bytes")
    said = release.artifact_complaints("0.28.0", root)
    assert "dist/stray.whl should not be there" in said
    assert "dist/afd_plugin-0.28.0.tar.gz does not have the sum in SHA256SUMS" in said
    (root / "dist" / "SHA256SUMS").unlink()
    assert any("dist/SHA256SUMS is missing" in line for line in release.artifact_complaints("0.28.0", root))


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.28.0", True),
        ("0.28.0.post1", True),
        ("0.28.0.post0", False),
        ("0.28.1", False),
        ("0.28.0rc1", False),
    ],
)
def test_versions_mirror_the_vllm_release(version: str, fits: bool) -> None:
    assert package.mirrored(version, "0.28.0") is fits


def test_the_bill_of_materials_names_what_the_lock_pins_and_is_the_same_twice(root: Path) -> None:
    text = sbom.bill("0.28.0", root)
    assert text == sbom.bill("0.28.0", root)
    bill = json.loads(text)
    assert bill["bomFormat"] == "CycloneDX"
    assert {"msgspec", "pyzmq", "typer"} <= {part["name"] for part in bill["components"]}
    assert all(part["hashes"] for part in bill["components"])
    assert "timestamp" not in bill["metadata"]
    name = "afd_plugin-0.28.0.cdx.json"
    sums = (root / "dist" / "SHA256SUMS").read_text()
    assert f"{hashlib.sha256((root / 'dist' / name).read_bytes()).hexdigest()}  {name}\n" in sums


def test_a_refusal_names_every_reason_and_a_call_without_a_tag_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "check", lambda name: ("one", "two"))
    assert release.main(["v9"]) == 1
    assert capsys.readouterr().err == "v9 cannot be released:\n  one\n  two\n"
    with pytest.raises(SystemExit):
        release.main([])


# ------------------------------------------------------------------ the other commands, on this checkout


def test_verify_says_whole_or_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--evidence", str(tmp_path), "verify", "--profile", "landing"]) == 1
    said = capsys.readouterr().out
    assert "missing: lint: no record" in said
    assert "no head was given" in said
    monkeypatch.setattr(verify, "verify", lambda *a, **k: verify.Verdict("h", (), ()))
    assert command.main(["--evidence", str(tmp_path), "verify", "--head", "h"]) == 0
    assert "whole; head h (attested head)" in capsys.readouterr().out


def test_report_schema_and_identity_are_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--evidence", str(tmp_path)]
    assert command.main([*place, "report"]) == 0
    assert "| layer | claim |" in capsys.readouterr().out
    assert command.main([*place, "report", str(tmp_path / "r.html")]) == 0
    assert "<h1>Evidence of afd-plugin</h1>" in (tmp_path / "r.html").read_text()
    assert command.main([*place, "schema"]) == 0
    assert (tmp_path / "schema.json").read_bytes() == ledger.schema()
    assert command.main([*place, "verify", "--cell", "tpu"]) == 2
    assert command.main(["identity", "h200x2"]) == 1
    assert "BLOCKED devices: the cell has 2" in capsys.readouterr().out


def test_the_published_schema_is_the_current_one() -> None:
    assert (ledger.DIRECTORY / ledger.SCHEMA_FILE).read_bytes() == ledger.schema()


def test_the_final_audit_fails_without_the_records_of_the_chain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a ledger of its own: what the repository's holds at this revision is another matter."""
    empty = ["--evidence", str(tmp_path)]
    assert final_audit.main(["--cell", "tpu", *empty]) == 2
    assert final_audit.main(["--cell", "h200x1", "--profile", "landing", *empty]) == 1
    said = capsys.readouterr()
    assert "GPU evidence on h200x1" in said.out
    assert "native_control: no record" in said.err
    assert "on the cell cpu: " in said.err, "what needs no GPU is demanded of the CPU cell's chain"
    assert "final_audit: no record" not in said.err


def test_the_final_audit_judges_the_tree_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = load("cpu")
    monkeypatch.setattr(revision, "dirty", lambda root: ("a.py",))
    monkeypatch.setattr(expected, "check_list", lambda suite: (f"{suite} is short",))
    monkeypatch.setattr(final_audit, "project_version", lambda root: "0.27.0")
    said = final_audit.tree_complaints(cell, parts(cell, Profile.LANDING))
    assert "dirty tree: a.py" in said
    assert "version 0.27.0 does not mirror vLLM 0.28.0" in said
    assert "unit is short" in said
    assert final_audit.chain_complaints(cell, identity.Binding("cpu", "l", "r", "e"), Profile.LANDING)
