# SPDX-License-Identifier: Apache-2.0
"""The numeric probe compares rows of the same tokens only, and names what a correct layer would not show."""

import numpy as np
import pytest

from afd_plugin.demo.records import Generation, Record
from tests.accuracy.comparing import Probe, common_rows, compare, read, rows_of

HIDDEN = 4


def answer(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Generation:
    return Generation(prompt, tokens, ())


NATIVE = (answer((1, 2, 3), (7, 8, 9, 7)), answer((4,), (5, 5, 5)))
"""6 and 3 rows."""


def probe(answers: tuple[Generation, ...] = NATIVE, **changed: np.ndarray) -> Probe:
    rows = sum(map(rows_of, answers))
    right = np.arange(1, rows * HIDDEN + 1, dtype=np.float32).reshape(rows, HIDDEN)
    return Probe({"layer-0": right, "mlp-0": 2 * right, **changed}, answers)


def sentences(afd: Probe) -> list[str]:
    return [one for layer in compare(probe(), afd) for one in layer.faults("bfloat16")]


def test_equal_runs_show_nothing() -> None:
    assert sentences(probe()) == []
    assert [(layer.name, layer.exact, len(layer.errors)) for layer in compare(probe(), probe())] == [
        ("layer-0", True, 9),
        ("mlp-0", True, 9),
    ]


@pytest.mark.parametrize(
    ("tokens", "compared"),
    [
        ((7, 8, 9, 7), [True] * 6),
        ((7, 8, 9, 6), [True] * 6),  # the last token is not computed any more
        ((7, 8, 6, 6), [True] * 5 + [False]),
        ((6, 8, 9, 7), [True] * 3 + [False] * 3),
    ],
)
def test_rows_count_up_to_the_first_token_that_differs(tokens: tuple[int, ...], compared: list[bool]) -> None:
    found = common_rows(NATIVE, (answer((1, 2, 3), tokens), NATIVE[1]))
    assert found.tolist() == compared + [True] * 3


def test_what_follows_from_another_token_is_no_fault_of_the_layer() -> None:
    rows = probe().outputs["mlp-0"].copy()
    rows[4:6] *= 3
    answers = (answer((1, 2, 3), (7, 6, 6, 6)), NATIVE[1])
    assert sentences(probe(answers, **{"mlp-0": rows})) == []
    assert sentences(probe(**{"mlp-0": rows})) != []


def test_one_lost_row_is_named_although_the_whole_has_nearly_its_norm() -> None:
    rows = probe().outputs["mlp-0"].copy()
    rows[0] = 0
    assert sentences(probe(**{"mlp-0": rows})) == [
        "mlp-0 differs in 1 of 9 rows, by up to 1.00e+00",
        "mlp-0 has lost 1 of 9 rows",
    ]


def test_a_wrong_scale_an_error_above_the_dtypes_and_numbers_that_are_none_are_named() -> None:
    right = probe().outputs["mlp-0"]
    assert any("0.4000 of native's norm" in one for one in sentences(probe(**{"mlp-0": 0.4 * right})))
    assert sentences(probe(**{"mlp-0": right * (1 + 2.0**-8)})) == []
    assert any("9 of 9 rows" in one for one in sentences(probe(**{"mlp-0": right * (1 + 2.0**-6)})))
    assert any("numbers that are none" in one for one in sentences(probe(**{"mlp-0": right * np.nan})))


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="asked the same"):
        common_rows(NATIVE, (answer((1, 2, 4), (7, 8, 9, 7)), NATIVE[1]))
    with pytest.raises(ValueError, match="different layers"):
        compare(probe(), Probe({"layer-0": probe().outputs["layer-0"]}, NATIVE))


def test_a_run_that_wrote_too_few_rows_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("probe")
    probe().outputs["mlp-0"].tofile(folder / "mlp-0.bin")
    assert len(read(folder, Record(NATIVE), HIDDEN).outputs["mlp-0"]) == 9
    probe().outputs["mlp-0"][:-1].tofile(folder / "mlp-0.bin")
    with pytest.raises(ValueError, match="mlp-0 has 8 rows; the answers took 9"):
        read(folder, Record(NATIVE), HIDDEN)
