# SPDX-License-Identifier: Apache-2.0
"""The ledger and its verdict. Faults are planted into a real file of records; no part of the judgement is faked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from qualify import cells, expected, ledger, sharding, verify
from qualify.cells import load
from qualify.chain import Part, Profile, gpu_free, parts
from qualify.identity import Binding
from qualify.ledger import Counts, Entry, LedgerError, Teardown, append, decode, read
from qualify.phases import Phase, Status
from qualify.verify import Verdict

CPU = load("cpu")
BINDING = Binding("cpu", "lock", "revision", "environment")
CASES = {"tests/unit/a.py::test_one": 4, "tests/unit/b.py::test_two": 1}


def entry(part: Part, binding: Binding = BINDING, status: Status = Status.PASS, **other: object) -> Entry:
    counts = Counts(collected=5, passed=5, failed=0, error=0, skipped=0, xfailed=0)
    fields = {
        "profile": "landing",
        "next_allowed_action": "go on",
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 1.5,
        "counts": counts if part.suite else None,
        "expected": expected.digest(CASES) if part.suite else None,
    } | other
    return Entry(
        cell=binding.cell,
        lock=binding.lock,
        revision=binding.revision,
        environment=binding.environment,
        session=part.session,
        shard=part.shard,
        phase=part.phase,
        status=status,
        **fields,  # type: ignore[arg-type]
    )


OPENING = Part("", Phase.FREEZE_IDENTITY)
LANDING = parts(CPU, Profile.LANDING)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with lists of cases and a whole landing chain, committed."""
    (tmp_path / expected.DIRECTORY).mkdir(parents=True)
    for suite in ("unit", "e2e"):
        (tmp_path / expected.DIRECTORY / f"{suite}.txt").write_text(expected.render(CASES))
    write(tmp_path, [entry(OPENING), *(entry(part) for part in LANDING)])
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "evidence"]):
        git(tmp_path, *words)
    return tmp_path


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, timeout=60)


def write(root: Path, entries: Sequence[Entry], cell: str = "cpu") -> None:
    path = ledger.path_of(cell, root / "evidence")
    path.unlink(missing_ok=True)
    for one in entries:
        append(one, root / "evidence")


def judge(root: Path, head: str | None = None, profile: Profile = Profile.LANDING) -> Verdict:
    return verify.verify(CPU, BINDING, profile, head=head, directory=root / "evidence", root=root)


def entries(root: Path) -> list[Entry]:
    return [record.entry for record in read("cpu", root / "evidence")]


def test_a_whole_chain_is_found_whole_and_its_head_is_the_last_record(project: Path) -> None:
    verdict = judge(project)
    assert verdict == Verdict(read("cpu", project / "evidence")[-1].hash, (), ())
    assert verdict.whole
    assert judge(project, head=verdict.head).whole


def test_every_edited_byte_is_found(project: Path) -> None:
    path = ledger.path_of("cpu", project / "evidence")
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    start = len(lines[0]) + len(lines[1])
    for position in range(start, start + len(lines[2])):
        planted = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        with pytest.raises(LedgerError):
            decode(planted)


def test_a_removed_a_moved_and_a_cut_line_are_found(project: Path) -> None:
    path = ledger.path_of("cpu", project / "evidence")
    lines = path.read_bytes().splitlines(keepends=True)
    for planted in (lines[:3] + lines[4:], [*lines[:3], lines[4], lines[3], *lines[5:]], lines[1:]):
        with pytest.raises(LedgerError, match="removed, added or moved"):
            decode(b"".join(planted))
    with pytest.raises(LedgerError, match="cut short"):
        decode(b"".join(lines)[:-1])
    path.write_bytes(b"".join([*lines[:-1], lines[-1].replace(b"1.5", b"1.4")]))
    assert "was edited" in judge(project).faults[0]


def test_a_cut_tail_is_found_by_the_head_by_the_history_and_by_what_the_chain_lacks(project: Path) -> None:
    head = judge(project).head
    path = ledger.path_of("cpu", project / "evidence")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    verdict = judge(project, head=head)
    assert "no record has the attested head" in verdict.faults[0]
    assert "was rewritten or cut" in verdict.faults[1]
    assert verdict.missing == ("docs: no record", "final_audit: no record")


def test_a_ledger_hashed_anew_as_a_whole_is_found_by_the_head_and_by_the_history(project: Path) -> None:
    head = judge(project).head
    changed = [msgspec.structs.replace(one, seconds=0.1) for one in entries(project)]
    write(project, changed)
    verdict = judge(project, head=head)
    assert verdict.missing == ()
    assert next(fault.split(":")[0] for fault in verdict.faults).startswith("no record has the attested head")
    assert "was rewritten or cut" in verdict.faults[1]
    git(project, "add", ".")
    git(project, "commit", "-qm", "forged")
    assert "does not continue the ledger of commit" in judge(project).faults[0]


def test_records_may_be_added_after_the_attested_head(project: Path) -> None:
    head = judge(project).head
    append(entry(OPENING, Binding("cpu", "lock", "next", "environment")), project / "evidence")
    assert judge(project, head=head).whole
    assert judge(project, head=head).head == head


@pytest.mark.parametrize(
    ("field", "value"), [("revision", "another"), ("lock", "another"), ("environment", "another")]
)
def test_a_record_of_another_binding_is_foreign_and_does_not_count(
    project: Path, field: str, value: str
) -> None:
    planted = entries(project)
    planted[3] = msgspec.structs.replace(planted[3], **{field: value})
    write(project, planted)
    verdict = judge(project)
    assert any(f"(unit) is foreign: {field} is not its chain's" in fault for fault in verdict.faults)
    assert verdict.missing == ("unit: no record",)


def test_a_record_of_another_cell_and_one_outside_any_chain_are_found(project: Path) -> None:
    stray = ledger.chained(msgspec.structs.replace(entry(LANDING[0]), cell="h200x1"), None)
    ledger.path_of("cpu", project / "evidence").write_bytes(ledger.encode(stray))
    faults = judge(project).faults
    assert any("is of the cell h200x1, this ledger is of cpu" in fault for fault in faults)
    assert any("belongs to no chain" in fault for fault in faults)


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("unit", {"status": Status.FAIL, "blocker": "a case failed"}, "unit: FAIL (a case failed)"),
        ("accuracy", {"status": Status.BLOCKED, "blocker": "no session"}, "accuracy: BLOCKED (no session)"),
        (
            "unit",
            {"expected": expected.digest({"tests/unit/a.py::test_one": 1})},
            "unit: ran another list of cases than",
        ),
        ("unit", {"counts": Counts(5, 4, 0, 0, 1, 0)}, "unit: did not pass all of 5 cases"),
        ("unit", {"counts": None}, "unit: did not pass all of 5 cases"),
        ("lint", {"teardown": Teardown(processes=("python x",))}, "lint: left processes or files behind"),
    ],
)
def test_a_pass_counts_only_whole(project: Path, part: str, change: dict[str, object], said: str) -> None:
    planted = [
        msgspec.structs.replace(one, **change) if one.session == part else one for one in entries(project)
    ]
    write(project, planted)
    assert any(line.startswith(said) for line in judge(project).missing), judge(project).missing


def test_sessions_out_of_order_and_sessions_the_chain_does_not_have_are_found(project: Path) -> None:
    planted = entries(project)
    planted[1], planted[2] = planted[2], planted[1]
    planted.append(entry(Part("party", Phase.FINAL_AUDIT)))
    write(project, planted)
    missing = judge(project).missing
    assert "typecheck: ran before a session that precedes it" in missing
    assert any("[('party', '')]" in line for line in missing)


def test_a_landing_chain_is_no_qualifying_one_and_a_failure_there_stands(project: Path) -> None:
    assert all(line.endswith("no record") for line in judge(project, profile=Profile.QUALIFYING).missing)
    full = [entry(part, profile="qualifying") for part in parts(CPU, Profile.QUALIFYING) if not part.suite]
    failed = msgspec.structs.replace(full[0], status=Status.FAIL, blocker="style")
    write(project, [entry(OPENING), failed, *full])
    assert "lint failed at this revision: it stands" in judge(project, profile=Profile.QUALIFYING).missing
    named = msgspec.structs.replace(failed, cause="disk-full")
    write(project, [entry(OPENING), named, *full])
    assert not any("stands" in line for line in judge(project, profile=Profile.QUALIFYING).missing)


def test_a_qualifying_failure_stands_in_whatever_environment_and_after_whatever_head(project: Path) -> None:
    """A whole chain passes elsewhere before or after it, and a tag carries the head from before it."""
    (project / expected.DIRECTORY / "e2e_all.txt").write_text(expected.render(CASES))
    chain = parts(CPU, Profile.QUALIFYING)
    shards = {part: sharding.of_shard(CASES, part.shard) for part in chain if part.suite}
    whole = [entry(OPENING, profile="qualifying")]
    for part in chain:
        one = entry(part, profile="qualifying")
        if part in shards:
            number = sum(shards[part].values())
            counts, digest = Counts(number, number, 0, 0, 0, 0), expected.digest(shards[part])
            one = msgspec.structs.replace(one, counts=counts, expected=digest)
        whole.append(one)
    write(project, whole)
    head = read("cpu", project / "evidence")[-1].hash
    elsewhere = msgspec.structs.replace(BINDING, environment="another")
    failed = entry(chain[0], elsewhere, Status.FAIL, profile="qualifying", blocker="style")
    opened = entry(OPENING, elsewhere, profile="qualifying")
    stands = ("lint failed at this revision: it stands",)
    for planted, at in (([opened, failed, *whole], None), ([*whole, opened, failed], head)):
        write(project, planted)
        assert judge(project, at, Profile.QUALIFYING).missing == stands
    landed = [msgspec.structs.replace(one, profile="landing") for one in (opened, failed)]
    other = [msgspec.structs.replace(one, revision="another") for one in (opened, failed)]
    named = [opened, msgspec.structs.replace(failed, cause="disk-full")]
    for harmless in (landed, other, named):
        write(project, [*harmless, *whole])
        assert judge(project, profile=Profile.QUALIFYING).missing == ()


def test_the_last_chain_is_the_last_of_its_profile(project: Path) -> None:
    """A landing chain elsewhere takes no qualifying one's place."""
    write(project, [entry(OPENING, profile="qualifying")])
    append(entry(OPENING, msgspec.structs.replace(BINDING, environment="another")), project / "evidence")
    records = read("cpu", project / "evidence")
    assert verify.latest(records, "cpu", "lock", "revision", Profile.QUALIFYING) == BINDING
    assert verify.latest(records, "cpu", "lock", "revision", Profile.LANDING) != BINDING
    assert verify.latest(records, "cpu", "lock", "next", Profile.QUALIFYING) is None


def test_the_published_schema_describes_a_line(project: Path) -> None:
    published = json.loads(ledger.schema())
    line = json.loads(ledger.path_of("cpu", project / "evidence").read_bytes().splitlines()[0])
    assert published["$ref"] == "#/$defs/Record"
    assert set(line) == set(published["$defs"]["Record"]["required"])
    assert set(line["entry"]) == set(published["$defs"]["Entry"]["properties"])


def test_a_line_with_an_unknown_field_or_another_schema_is_refused() -> None:
    record = ledger.chained(entry(OPENING), None)
    with pytest.raises(LedgerError, match="not a record"):
        decode(ledger.encode(record).replace(b'"schema":1', b'"schema":1,"x":2'))
    with pytest.raises(LedgerError, match="schema 9"):
        decode(ledger.encode(record).replace(b'"schema":1', b'"schema":9'))
    with pytest.raises(LedgerError, match="form"):
        decode(ledger.encode(record).replace(b'"schema":1', b'"schema": 1'))


GPU = load("h200x1")
GPU_BINDING = Binding("h200x1", "lock", "revision", "gpu host")


@pytest.fixture
def both(project: Path) -> Path:
    """The same with the cells' description, and the chain of a GPU cell at the same revision."""
    (project / "containers").mkdir()
    (project / "containers" / "cells.toml").write_bytes(
        (cells.ROOT / "containers" / "cells.toml").read_bytes()
    )
    for name in CPU.locks:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    (project / expected.DIRECTORY / "gpu_e2e.txt").write_text(expected.render(CASES))
    locked = msgspec.structs.replace(BINDING, lock=CPU.lock_digest(project))
    write(project, [entry(OPENING, locked), *(entry(part, locked) for part in LANDING)])
    chain = parts(GPU, Profile.LANDING)
    write(project, [entry(OPENING, GPU_BINDING), *(entry(part, GPU_BINDING) for part in chain)], "h200x1")
    return project


def on_gpu(root: Path) -> Verdict:
    return verify.verify(GPU, GPU_BINDING, Profile.LANDING, directory=root / "evidence", root=root)


def test_a_gpu_cells_chain_is_whole_only_beside_the_cpu_cells_of_the_same_revision(both: Path) -> None:
    assert on_gpu(both).whole, on_gpu(both)
    others = [msgspec.structs.replace(one, revision="another") for one in entries(both)]
    kept = entries(both)
    write(both, others)
    assert on_gpu(both).missing == tuple(
        f"on the cell cpu: {part.session}: no record" for part in gpu_free(GPU)
    )
    write(both, [msgspec.structs.replace(one, lock="another") for one in kept])
    assert len(on_gpu(both).missing) == len(gpu_free(GPU))
    write(both, [msgspec.structs.replace(one, profile=Profile.QUALIFYING.value) for one in kept])
    assert on_gpu(both).whole, "a qualifying chain holds the same, and demands more"
    failed = [
        msgspec.structs.replace(one, status=Status.FAIL, blocker="style") if one.session == "lint" else one
        for one in kept
    ]
    write(both, failed)
    assert on_gpu(both).missing == ("on the cell cpu: lint: FAIL (style)",)
