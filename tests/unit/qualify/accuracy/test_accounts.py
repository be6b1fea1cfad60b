# SPDX-License-Identifier: Apache-2.0
"""What the accuracy session measured reaches the record, and it runs only behind the end-to-end gate."""

from pathlib import Path

import msgspec
import pytest

from qualify import execution
from qualify.accuracy import gate
from qualify.cells import Cell, load
from qualify.chain import Part, Profile, parts
from qualify.ledger import Entry
from qualify.phases import Phase, Status

WRITE = """
from qualify.accuracy.gate import write_accounts
write_accounts({"rows": 1600, "p_value": 1.0}, {"samples": "ab" * 32})
"""


class Written(Part):
    """A session that only writes its accounts."""

    @property
    def command(self) -> tuple[str, ...]:
        return ("-c", WRITE)


def test_metrics_and_digests_of_a_session_are_read_by_the_gate(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    with execution.Running(Written("accuracy", Phase.ACCURACY_GATE), tmp_path, root) as running:
        outcome = running.outcome(60)
    assert (outcome.status, dict(outcome.metrics)) == (0, {"rows": 1600.0, "p_value": 1.0})
    assert dict(outcome.digests) == {"samples": "ab" * 32}


def test_a_session_that_writes_nothing_has_no_account_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "digests.json").write_text('{"samples": "stale"}')
    (tmp_path / "metrics.json").write_text('{"rows": 1}')

    class Silent(Part):
        @property
        def command(self) -> tuple[str, ...]:
            return ("-c", "pass")

    with execution.Running(Silent("accuracy", Phase.ACCURACY_GATE), tmp_path, tmp_path) as running:
        outcome = running.outcome(60)
    assert (dict(outcome.metrics), dict(outcome.digests)) == ({}, {})


def entry(part: Part, status: Status) -> Entry:
    return Entry(
        cell="cpu",
        lock="l",
        revision="r",
        environment="e",
        profile="landing",
        session=part.session,
        shard=part.shard,
        phase=part.phase,
        status=status,
        next_allowed_action="a",
        started="",
        seconds=1.0,
    )


def end_to_end(cell: Cell, profile: Profile) -> list[Part]:
    return [part for part in parts(cell, profile) if part.phase is Phase.BASIC_E2E_GATE]


@pytest.mark.parametrize("profile", Profile)
def test_every_end_to_end_part_of_one_profile_must_have_passed(profile: Profile) -> None:
    cell = load("cpu")
    passed = [entry(part, Status.PASS) for part in end_to_end(cell, profile)]
    assert gate.e2e_passed({profile: passed}, cell)
    assert not gate.e2e_passed({profile: passed[1:]}, cell)
    failed = [*passed, msgspec.structs.replace(passed[0], status=Status.FAIL)]
    assert not gate.e2e_passed({profile: failed}, cell)


def test_records_of_one_profile_do_not_complete_another() -> None:
    cell = load("cpu")
    landing = [entry(part, Status.PASS) for part in end_to_end(cell, Profile.LANDING)]
    assert not gate.e2e_passed({Profile.QUALIFYING: landing}, cell)


def test_the_gate_runs_accuracy_on_its_own_cell_after_end_to_end() -> None:
    cell = msgspec.structs.replace(load("cpu"), name="elsewhere")
    for profile in Profile:
        chain = parts(cell, profile)
        (position,) = (index for index, part in enumerate(chain) if part.session == "accuracy")
        assert chain[position].arguments == ("--cell", "elsewhere")
        assert chain[position - 1].phase is Phase.BASIC_E2E_GATE
