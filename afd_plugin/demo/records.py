# SPDX-License-Identifier: Apache-2.0
"""A recorded generation: what one engine answered to a list of prompts, exact to the last bit.

Log-probabilities are the engine's float32 values widened to Python floats. `json` writes the shortest
decimal that reads back as the same float, so a record survives a file or an HTTP answer unchanged.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TokenLogprob = tuple[int, float]
"""A token id and its log-probability."""

TOP_LOGPROBS = 3
"""How many candidates are recorded at each position."""


@dataclass(frozen=True)
class Generation:
    """One answer: the prompt's token ids, the generated ids, and the best candidates at each position."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...]


@dataclass(frozen=True)
class Record:
    """All answers of one run in the order of the prompts, and what describes the run."""

    generations: tuple[Generation, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_record(path: Path) -> Record:
    """The record that `Record.write` wrote; KeyError or ValueError when it is not one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Record(tuple(_generation(item) for item in content["generations"]), content["details"])


def best(candidates: Mapping[int, float]) -> tuple[TokenLogprob, ...]:
    """The `TOP_LOGPROBS` most likely candidates; equal ones in order of token id.

    vLLM answers with the sampled token and the top candidates, at times one more than asked for.
    """
    ordered = sorted(candidates.items(), key=lambda item: (-item[1], item[0]))
    return tuple(ordered[:TOP_LOGPROBS])


def _generation(item: Mapping[str, Any]) -> Generation:
    return Generation(
        prompt_token_ids=tuple(item["prompt_token_ids"]),
        token_ids=tuple(item["token_ids"]),
        top_logprobs=tuple(
            tuple((int(token), float(value)) for token, value in position)
            for position in item["top_logprobs"]
        ),
    )
