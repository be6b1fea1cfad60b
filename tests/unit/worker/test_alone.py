# SPDX-License-Identifier: Apache-2.0
import pytest

from afd_plugin.v1.worker.announcer import alone


@pytest.mark.parametrize(
    ("own", "lane", "announced"),
    [((5,), 0, ((5,), (0,), (0,))), ((5,), 2, ((0,), (0,), (5,))), ((3, 4), 1, ((0, 0), (3, 4), (0, 0)))],
)
def test_an_engine_of_its_own_announces_no_rows_of_others(
    own: tuple[int, ...], lane: int, announced: tuple[tuple[int, ...], ...]
) -> None:
    assert alone((own,), lane, 3) == announced
