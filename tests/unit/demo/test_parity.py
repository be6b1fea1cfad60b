# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace
from pathlib import Path

import pytest

from afd_plugin.demo.parity import RecordError, compare
from afd_plugin.demo.records import Generation, Record, best, read_record

ANSWERS = (
    Generation((0, 5), (7, 8), (((7, -0.25), (9, -1.5), (3, -2.0)), ((8, -0.125), (2, -3.0), (4, -3.5)))),
    Generation((0, 6), (1, 2), (((1, -0.5), (2, -1.0), (3, -2.0)), ((2, -0.5), (1, -1.0), (3, -2.0)))),
)
REFERENCE = Record(ANSWERS)


def with_first_answer(**changes: object) -> Record:
    return Record((replace(ANSWERS[0], **changes), ANSWERS[1]))


def test_a_record_equals_itself_in_every_entry() -> None:
    parity = compare(REFERENCE, Record(ANSWERS))
    assert (parity.requests, parity.equal_token_lists) == (2, 2)
    assert (parity.logprob_entries, parity.bitwise_equal) == (12, 12)
    assert parity.max_abs_dlogprob == 0.0
    assert parity.exact


def test_the_smallest_change_of_one_float_is_found() -> None:
    nudged = math.nextafter(-0.25, 0)
    changed = with_first_answer(
        top_logprobs=(((7, nudged), (9, -1.5), (3, -2.0)), ANSWERS[0].top_logprobs[1])
    )
    parity = compare(REFERENCE, changed)
    assert (parity.equal_token_lists, parity.bitwise_equal) == (2, 11)
    assert parity.max_abs_dlogprob == abs(nudged + 0.25) > 0
    assert not parity.exact


def test_a_changed_token_is_found_even_with_equal_logprobs() -> None:
    parity = compare(REFERENCE, with_first_answer(token_ids=(7, 9)))
    assert (parity.equal_token_lists, parity.bitwise_equal) == (1, 12)
    assert not parity.exact


def test_a_candidate_with_another_token_but_the_same_float_is_not_equal() -> None:
    changed = with_first_answer(top_logprobs=(((7, -0.25), (9, -1.5), (5, -2.0)), ANSWERS[0].top_logprobs[1]))
    parity = compare(REFERENCE, changed)
    assert parity.bitwise_equal == 11
    assert parity.max_abs_dlogprob == 0.0  # token 5 may be as likely in the reference as its last candidate


def test_differences_after_the_lists_part_do_not_count_into_the_largest() -> None:
    changed = with_first_answer(
        token_ids=(9, 8),
        top_logprobs=(((9, -0.75), (7, -1.0), (3, -2.0)), ((8, -50.0), (2, -60.0), (4, -70.0))),
    )
    assert compare(REFERENCE, changed).max_abs_dlogprob == 0.75


def test_disjoint_candidates_count_with_the_least_they_can_differ_by() -> None:
    changed = with_first_answer(
        top_logprobs=(((10, -0.5), (11, -1.0), (12, -4.0)), ANSWERS[0].top_logprobs[1])
    )
    assert compare(REFERENCE, changed).max_abs_dlogprob == 3.75


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_is_refused_on_either_side(value: float) -> None:
    changed = with_first_answer(top_logprobs=(((7, value), (9, -1.5), (3, -2.0)), ANSWERS[0].top_logprobs[1]))
    with pytest.raises(RecordError, match=r"answer 0 of the candidate.*not finite"):
        compare(REFERENCE, changed)
    with pytest.raises(RecordError, match=r"answer 0 of the reference.*not finite"):
        compare(changed, changed)


@pytest.mark.parametrize(
    ("candidate", "sentence"),
    [
        (Record(()), "candidate has no answers"),
        (Record(ANSWERS[:1]), "2 answers, the candidate 1"),
        (with_first_answer(token_ids=(), top_logprobs=()), "has no tokens"),
        (with_first_answer(top_logprobs=ANSWERS[0].top_logprobs[:1]), "2 tokens but 1"),
        (with_first_answer(top_logprobs=(ANSWERS[0].top_logprobs[0], ())), "no log-probabilities"),
        (with_first_answer(top_logprobs=(((7, -0.25), (7, -1.0)),) * 2), "token twice"),
        (with_first_answer(token_ids=(7,), top_logprobs=ANSWERS[0].top_logprobs[:1]), "2 tokens in the ref"),
        (with_first_answer(top_logprobs=(((7, -0.25),),) * 2), "3 candidates in the reference, 1"),
        (with_first_answer(prompt_token_ids=(0, 9)), "prompts differ"),
    ],
)
def test_records_that_do_not_match_are_refused(candidate: Record, sentence: str) -> None:
    with pytest.raises(RecordError, match=sentence):
        compare(REFERENCE, candidate)


def test_an_empty_reference_never_counts_as_equal() -> None:
    with pytest.raises(RecordError, match="reference has no answers"):
        compare(Record(()), Record(()))


def test_a_record_survives_its_file_to_the_last_bit(tmp_path: Path) -> None:
    odd = replace(ANSWERS[0], top_logprobs=(((7, -0.1), (9, -1 / 3)), ((8, -5e-324), (2, -1e308))))
    record = Record((odd, ANSWERS[1]), {"cell": "cpu"})
    record.write(tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == record


def test_candidates_are_the_three_best_and_ties_go_by_token_id() -> None:
    assert best({4: -1.0, 9: -0.5, 2: -1.0, 1: -7.0}) == ((9, -0.5), (2, -1.0), (4, -1.0))
