# SPDX-License-Identifier: Apache-2.0
"""One step of a model as data, and the order of its exchanges: the one schedule both roles follow.

Attention announces a :class:`StepPlan` before it runs its model; from it and the units agreed at the handshake both
roles derive the same exchanges in the same order, so nothing about shapes or order is negotiated while a step runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NamedTuple


class StepKind(str, Enum):
    """Why a forward pass runs. A dummy carries no request: profiling, warm-up, an idle data-parallel rank."""

    REAL = "real"
    DUMMY = "dummy"
    CAPTURE = "capture"


class UnitKind(str, Enum):
    """What the FFN computes for one exchange."""

    EXPERTS = "experts"
    DENSE = "dense"


@dataclass(frozen=True)
class RemoteUnit:
    """One module of the model that the FFN computes for attention.

    ``name`` is the module path in the model. ``router_logits`` is the width of the logits attention sends along, 0
    where the FFN computes them itself.
    """

    index: int
    name: str
    kind: UnitKind
    router_logits: int = 0


class StepPlan(NamedTuple):
    """One announced forward pass; a tuple, because one is made in every step of attention's host.

    ``tokens[lane][stage]`` are rows of hidden states; every lane has the same number of stages and a row count may be
    0. ``graph`` says that attention replays a captured graph, so its layers run without any Python. ``resume`` counts
    the exchanges at the beginning of the schedule that were answered in an earlier life of the FFN.
    """

    step: int
    kind: StepKind
    tokens: tuple[tuple[int, ...], ...]
    graph: bool = False
    resume: int = 0

    @property
    def stages(self) -> int:
        return len(self.tokens[0])

    def lane_tokens(self, lane: int) -> int:
        """Rows of ``lane`` over all stages."""
        return sum(self.tokens[lane])

    def stage_tokens(self, stage: int) -> int:
        """Rows of ``stage`` over all lanes."""
        return sum(stages[stage] for stages in self.tokens)

    def group_rows(self, lanes: Sequence[int], stage: int) -> tuple[int, ...]:
        """Rows that each lane of one FFN group brings to ``stage``, in the order in which they are laid out."""
        return tuple(self.tokens[lane][stage] for lane in lanes)

    def group_tokens(self, lanes: Sequence[int], stage: int) -> int:
        """Rows that the lanes of one FFN group bring to ``stage`` together."""
        return sum(self.group_rows(lanes, stage))

    def check(self, lanes: int, max_tokens: int) -> None:
        """Raise ``ValueError`` unless the plan fits ``lanes`` and each lane stays within ``max_tokens`` rows."""
        if len(self.tokens) != lanes:
            raise ValueError(f"step {self.step} names {len(self.tokens)} lanes; the topology has {lanes}.")
        if len({len(stages) for stages in self.tokens}) != 1 or self.stages not in (1, 2):
            raise ValueError(f"step {self.step} has uneven or unknown stages: {self.tokens}.")
        if self.resume and (self.graph or self.stages != 1):
            raise ValueError(f"step {self.step} resumes at exchange {self.resume}, but not layer by layer.")
        for lane, stages in enumerate(self.tokens):
            if min(stages) < 0 or sum(stages) > max_tokens:
                raise ValueError(
                    f"step {self.step}: lane {lane} announces {stages} tokens; 0 to {max_tokens} are allowed."
                )


@dataclass(frozen=True)
class Exchange:
    """Identity of one hand-off: which unit, which stage of the step."""

    step: int
    unit: int
    stage: int


def schedule(plan: StepPlan, units: Sequence[RemoteUnit]) -> Iterator[Exchange]:
    """The exchanges of ``plan`` in the order both roles run them: unit by unit, stage by stage within a unit.

    Those that ``plan.resume`` counts are left out; ``ValueError`` when it counts them all.
    """
    if plan.resume >= max(1, len(units) * plan.stages):
        raise ValueError(f"step {plan.step} resumes at exchange {plan.resume} of {len(units) * plan.stages}.")
    order = (Exchange(plan.step, unit.index, stage) for unit in units for stage in range(plan.stages))
    yield from islice(order, plan.resume, None)


HEADER_BYTES = 64
"""Bytes before the rows of a message: five int64 (step, unit, stage, rows, the router logits' dtype) and padding to a
cache line.
"""

LOGIT_BYTES = 4
"""Bytes reserved per router logit, whatever their type: float32 is the widest router in vLLM."""


@dataclass(frozen=True)
class MessageLayout:
    """Byte layout of one packed message: header, hidden states, router logits.

    Sizes depend on nothing but the row count, so a receiver can post its buffer from the plan alone.
    """

    hidden_size: int
    itemsize: int
    router_logits: int = 0

    def logits_offset(self, rows: int) -> int:
        """Start of the logits block; aligned to 64 bytes."""
        end = HEADER_BYTES + rows * self.hidden_size * self.itemsize
        return (end + 63) // 64 * 64 if self.router_logits else end

    def size(self, rows: int) -> int:
        """Bytes of a message of ``rows`` rows."""
        return self.logits_offset(rows) + rows * self.router_logits * LOGIT_BYTES
