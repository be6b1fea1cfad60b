# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from tests.unit.connectors.contract import ContractSuite
from tests.unit.connectors.scenarios import UNITS
from tests.unit.connectors.team import START_S, Team

ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(START_S + 60)  # whichever test comes first waits for vLLM's import


class TestGloo(ContractSuite):
    connector = "GlooAFDConnector"
    environment = ENVIRONMENT


@pytest.fixture
def two_groups() -> Iterator[list[Team]]:
    """The processes of 4A2F: two FFN groups with two lanes each."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Team(2, ENVIRONMENT))) for _ in range(2)]


def test_a_thousand_unequal_and_empty_steps_through_six_processes_arrive_to_the_bit(
    two_groups: list[Team],
) -> None:
    steps = 1000
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(
                team.run, "many_steps", connector="GlooAFDConnector", group=group, groups=2, steps=steps
            )
            for group, team in enumerate(two_groups)
        ]
        ends = [end for future in running for end in future.result()]
    assert [end["wrong"] for end in ends] == [0] * 6
    assert all(end["empty"] > steps / 10 for end in ends)
    exchanges = steps * len(UNITS)
    assert [end["compared"] for end in ends[::3]] == [exchanges] * 2
    for end in (*ends[1:3], *ends[4:]):
        assert end["compared"] + end["empty"] == exchanges
