# SPDX-License-Identifier: Apache-2.0
"""The contract of a connector as tests, the same for every transport. A subclass names the transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from tests.unit.connectors.scenarios import LOGITS, MAX_TOKENS, UNITS
from tests.unit.connectors.team import Team

LANES = 2

ONE_STAGE = [
    [[1], [1]],
    [[5], [0]],
    [[0], [7]],
    [[0], [0]],
    [[4], [4]],
    [[7], [1]],  # the same sum in another layout
    [[MAX_TOKENS], [MAX_TOKENS]],
    [[3], [90]],
]
TWO_STAGES = [
    [[2, 2], [2, 2]],
    [[40, 1], [1, 40]],
    [[8, 0], [0, 8]],
    [[48, 48], [48, 48]],
]


class Processes:
    """The fixture ``team``: one process per end."""

    connector: ClassVar[str]
    environment: ClassVar[dict[str, str]] = {}
    lanes: ClassVar[int] = LANES

    @pytest.fixture(scope="class")
    @classmethod
    def teams(cls) -> Iterator[list[Team]]:
        made: list[Team] = []
        yield made
        for team in made:
            team.close()

    @pytest.fixture
    def team(self, teams: list[Team]) -> Team:
        """A whole team; a new one after a test in which a process died."""
        if not teams or not teams[-1].whole:
            teams.append(Team(self.lanes, {"HF_HUB_OFFLINE": "1", **self.environment}))
        return teams[-1]


class ContractSuite(Processes):
    """Inherit, set ``connector`` and ``environment``, and every promise is tested between real processes."""

    @pytest.mark.parametrize(("layouts", "stages"), [(ONE_STAGE, 1), (TWO_STAGES, 2)], ids=["one", "two"])
    def test_every_lane_gets_the_answer_to_its_own_rows(
        self, team: Team, layouts: list[list[list[int]]], stages: int
    ) -> None:
        layouts = [rows[: self.lanes] for rows in layouts]
        ffn, *lanes = team.run("round_trips", connector=self.connector, layouts=layouts, stages=stages)
        assert [lane["wrong"] for lane in lanes] == [0] * self.lanes
        due = [
            len(UNITS) * sum(stage > 0 for rows in layouts for stage in rows[lane])
            for lane in range(self.lanes)
        ]
        assert [lane["sent"] for lane in lanes] == [lane["received"] for lane in lanes] == due
        assert ffn["sent"] == ffn["received"] == sum(due)

    def test_a_message_of_another_unit_is_an_error_and_never_data(self, team: Team) -> None:
        seen, *_ = team.run("stale_message", connector=self.connector)
        assert "unit 1" in seen

    def test_tensors_that_do_not_fit_the_handshake_are_refused_where_they_enter(self, team: Team) -> None:
        ffn, *lanes = team.run("wrong_tensors", connector=self.connector)
        assert ffn == ["rows", "dtype"]
        assert lanes == [["width", "dtype", "no logits", "logits width"]] * self.lanes

    def test_memory_does_not_grow_with_the_shapes_seen(self, team: Team) -> None:
        for before, after in team.run("bounded_memory", connector=self.connector, steps=100):
            assert after <= before * 1.02 + LOGITS * MAX_TOKENS * 4

    def test_every_life_ends_as_it_began(self, team: Team) -> None:
        free = team.run("lives", connector=self.connector, count=3)
        assert all(len(set(seen[1:])) == 1 for seen in free), free

    def test_a_wait_ends_when_its_peer_dies(self, team: Team) -> None:
        (name, seconds), *_ = team.run("peer_dies", dying=(1,), connector=self.connector)
        assert name == "peer-lost"
        assert seconds < 10


class StreamOrderedSuite(ContractSuite):
    """Promises of connectors that enqueue on a CUDA stream."""

    large: ClassVar[int] = 4096
    """Rows of one stage of the largest step: two of them are 8192 rows of 7168, 117 MB each way."""

    after_abort: ClassVar[frozenset[str]] = frozenset({"silent"})
    """What may become of answers computed after an aborted wait; see ``answers_after_abort``."""

    @pytest.mark.parametrize("stages", [1, 2])
    @pytest.mark.parametrize("rows", [1, 48])
    def test_a_captured_step_replays_and_mixes_with_eager_steps(
        self, team: Team, rows: int, stages: int
    ) -> None:
        count = 50
        ffn, *lanes = team.run("replays", connector=self.connector, rows=rows, count=count, stages=stages)
        assert [lane["wrong"] for lane in lanes] == [0] * self.lanes
        for end in (ffn, *lanes):
            assert end["replayed"] == stages * count * 4 // 5
            assert end["eager"] == stages * (count // 5 + 1)

    def test_abort_releases_a_wait_on_the_device(self, team: Team) -> None:
        seconds, *_ = team.run("released_by_abort", connector=self.connector)
        # By the abort half a second after its begin, not by the bound of 20 s on an exchange.
        assert 0.4 < seconds < 10

    def test_what_is_computed_after_an_aborted_wait_is_never_taken_for_an_answer(self, team: Team) -> None:
        _, *lanes = team.run("answers_after_abort", connector=self.connector)
        assert set(lanes) <= self.after_abort

    def test_messages_of_two_stages_in_flight_at_once_wait_for_nobody_in_a_circle(self, team: Team) -> None:
        """As microbatches send them: both stages' rows before the first answer, larger than any transport buffers."""
        _, *lanes = team.run("in_flight", connector=self.connector, rows=self.large, hidden=7168, steps=4)
        assert [lane["wrong"] for lane in lanes] == [0] * self.lanes
