# SPDX-License-Identifier: Apache-2.0
"""Compares two recorded generations bit for bit. Pure functions; no torch, no vLLM.

An entry is one candidate at one position: it is equal when both its token id and its float are. A record
that is empty, holds a NaN or an infinity, or has another number of answers, positions or candidates than
its counterpart is refused: it must never count as equal.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from afd_plugin.demo.records import Generation, Record, TokenLogprob


class RecordError(ValueError):
    """Two records that cannot be compared; the sentence says which answer and why."""


@dataclass(frozen=True)
class Parity:
    """What a comparison found.

    `max_abs_dlogprob` is over the candidates at positions up to and including the first one where the token
    lists part (after it the two engines answer different questions). A token that only one record lists
    counts with the least it can differ by: its distance to the other record's last candidate.
    """

    requests: int
    equal_token_lists: int
    logprob_entries: int
    bitwise_equal: int
    max_abs_dlogprob: float

    @property
    def exact(self) -> bool:
        """Whether everything compared is equal to the last bit."""
        return self.equal_token_lists == self.requests and self.bitwise_equal == self.logprob_entries


def compare(reference: Record, candidate: Record) -> Parity:
    """Compare `candidate` with `reference`, answer by answer; RecordError when they cannot be compared."""
    _check_record(reference, "reference")
    _check_record(candidate, "candidate")
    if len(reference.generations) != len(candidate.generations):
        raise RecordError(
            f"the reference has {len(reference.generations)} answers, the candidate "
            f"{len(candidate.generations)}; both must come from the same requests"
        )
    pairs = list(zip(reference.generations, candidate.generations, strict=True))
    for index, (ours, theirs) in enumerate(pairs):
        _check_pair(index, ours, theirs)
    return Parity(
        requests=len(pairs),
        equal_token_lists=sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs),
        logprob_entries=sum(len(position) for ours, _ in pairs for position in ours.top_logprobs),
        bitwise_equal=sum(_equal_entries(ours, theirs) for ours, theirs in pairs),
        max_abs_dlogprob=max(_largest_difference(ours, theirs) for ours, theirs in pairs),
    )


def _check_record(record: Record, label: str) -> None:
    if not record.generations:
        raise RecordError(f"the {label} has no answers; nothing was compared")
    for index, generation in enumerate(record.generations):
        where = f"answer {index} of the {label}"
        if not generation.token_ids:
            raise RecordError(f"{where} has no tokens")
        if len(generation.top_logprobs) != len(generation.token_ids):
            raise RecordError(
                f"{where} has {len(generation.token_ids)} tokens but {len(generation.top_logprobs)} "
                "lists of log-probabilities; one for each token is expected"
            )
        for position, candidates in enumerate(generation.top_logprobs):
            if not candidates:
                raise RecordError(f"{where} has no log-probabilities at position {position}")
            if not all(math.isfinite(value) for _, value in candidates):
                raise RecordError(f"{where} has a log-probability at position {position} that is not finite")
            if len({token for token, _ in candidates}) != len(candidates):
                raise RecordError(f"{where} has a token twice at position {position}")


def _check_pair(index: int, ours: Generation, theirs: Generation) -> None:
    if ours.prompt_token_ids != theirs.prompt_token_ids:
        raise RecordError(f"answer {index}: the prompts differ; both must come from the same requests")
    if len(ours.token_ids) != len(theirs.token_ids):
        raise RecordError(
            f"answer {index}: {len(ours.token_ids)} tokens in the reference, "
            f"{len(theirs.token_ids)} in the candidate"
        )
    for position, (left, right) in enumerate(zip(ours.top_logprobs, theirs.top_logprobs, strict=True)):
        if len(left) != len(right):
            raise RecordError(
                f"answer {index}, position {position}: {len(left)} candidates in the reference, "
                f"{len(right)} in the candidate"
            )


def _positions(
    ours: Generation, theirs: Generation
) -> Iterator[tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]]:
    return zip(ours.top_logprobs, theirs.top_logprobs, strict=True)


def _equal_entries(ours: Generation, theirs: Generation) -> int:
    return sum(
        left == right
        for one, other in _positions(ours, theirs)
        for left, right in zip(one, other, strict=True)
    )


def _largest_difference(ours: Generation, theirs: Generation) -> float:
    largest = 0.0
    tokens = zip(ours.token_ids, theirs.token_ids, strict=True)
    for (mine, yours), (one, other) in zip(tokens, _positions(ours, theirs), strict=True):
        left, right = dict(one), dict(other)
        largest = max(largest, logprob_difference(left, right), logprob_difference(right, left))
        if mine != yours:
            break
    return largest


def logprob_difference(left: Mapping[int, float], right: Mapping[int, float]) -> float:
    """By how much the entries of `left` (log probability by token id) differ from `right`'s at least.

    A token that `right` does not list was there at most as likely as the least that it does list.
    """
    least = min(right.values())
    return max(
        abs(value - right[token]) if token in right else max(0.0, value - least)
        for token, value in left.items()
    )
