# SPDX-License-Identifier: Apache-2.0
"""Microbatches: when a lane splits, that stages share no metadata, and that no dead stage is waited for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
from vllm.config import CUDAGraphMode, ParallelConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.ubatch_utils import UBatchSlice

from afd_plugin.plan import StepKind
from afd_plugin.v1.worker.announcer import GraphPhase, graph_phase, lane_tokens, step_kind
from afd_plugin.v1.worker.microbatching import (
    LaneUBatchWrapper,
    end_with_any_stage,
    separate_metadata,
    should_split,
)

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("tokens", "padded", "uniform", "split"),
    [
        (31, 32, True, True),  # the padded size names the graph, so it alone decides
        (24, 24, True, False),
        (511, 511, False, False),
        (512, 512, False, True),
        (33, 64, True, True),
        (32, 64, True, False),  # the second stage would hold padding only
    ],
)
def test_a_lane_splits_by_the_padded_size_and_never_into_padding(
    tokens: int, padded: int, uniform: bool, split: bool
) -> None:
    parallel = ParallelConfig(dbo_decode_token_threshold=32, dbo_prefill_token_threshold=512)
    parallel.enable_dbo = True
    assert should_split(parallel, tokens, padded, uniform) is split
    parallel.enable_dbo = False
    assert not should_split(parallel, tokens, padded, uniform)


def test_no_stage_is_built_from_the_metadata_of_another() -> None:
    builders = [SimpleNamespace(supports_update_block_table=True) for _ in range(4)]
    groups = [
        [SimpleNamespace(metadata_builders=builders[:2])],
        [SimpleNamespace(metadata_builders=builders[2:])],
    ]
    separate_metadata(groups)  # type: ignore[arg-type]
    assert not any(builder.supports_update_block_table for builder in builders)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stage_that_dies_ends_the_worker_instead_of_being_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    ended: list[BaseException] = []
    end_with_any_stage(ended.append)

    def die(error: type[BaseException]) -> None:
        raise error("planted")

    for error in (RuntimeError, SystemExit):
        thread = threading.Thread(target=die, args=(error,))
        thread.start()
        thread.join()
    assert [type(error) for error in ended] == [RuntimeError]


def context(mode: CUDAGraphMode, tokens: int, slices: list[int] | None = None) -> SimpleNamespace:
    """As much of a forward context as the announcer reads."""
    starts = [sum(slices[:i]) for i in range(len(slices))] if slices else []
    return SimpleNamespace(
        cudagraph_runtime_mode=mode,
        batch_descriptor=BatchDescriptor(num_tokens=tokens),
        ubatch_slices=[
            UBatchSlice(slice(0, 1), slice(start, start + count))
            for start, count in zip(starts, slices or [], strict=True)
        ]
        or None,
        dp_metadata=None,
        attn_metadata={},
    )


def wrapper(kind: type, **attributes: object) -> object:
    """A native wrapper without its constructor, which needs a GPU."""
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


def test_a_graph_wrapper_captures_a_size_once_and_then_replays_it() -> None:
    entry = CUDAGraphEntry(BatchDescriptor(num_tokens=8), cudagraph=object())  # type: ignore[arg-type]
    inner = wrapper(CUDAGraphWrapper, concrete_cudagraph_entries={BatchDescriptor(num_tokens=8): entry})
    assert graph_phase(inner, context(CUDAGraphMode.FULL, 8)) is GraphPhase.REPLAY  # type: ignore[arg-type]
    assert graph_phase(inner, context(CUDAGraphMode.FULL, 16)) is GraphPhase.CAPTURE  # type: ignore[arg-type]
    assert graph_phase(inner, context(CUDAGraphMode.NONE, 8)) is GraphPhase.EAGER  # type: ignore[arg-type]


def test_a_split_size_has_a_graph_of_two_stages_and_none_of_one() -> None:
    whole = wrapper(CUDAGraphWrapper, concrete_cudagraph_entries={})
    inner = wrapper(LaneUBatchWrapper, cudagraphs={64: object()}, cudagraph_wrapper=whole)
    full = CUDAGraphMode.FULL
    assert graph_phase(inner, context(full, 64, [32, 32])) is GraphPhase.REPLAY  # type: ignore[arg-type]
    assert graph_phase(inner, context(full, 40, [20, 20])) is GraphPhase.CAPTURE  # type: ignore[arg-type]
    assert graph_phase(inner, context(full, 64)) is GraphPhase.EAGER  # type: ignore[arg-type]
    assert graph_phase(inner, context(full, 8)) is GraphPhase.CAPTURE  # type: ignore[arg-type]


def test_stages_are_announced_with_their_own_sizes_and_dummies_as_such() -> None:
    split = context(CUDAGraphMode.NONE, 40, [20, 20])
    assert lane_tokens(split, 40) == ((20, 20),)  # type: ignore[arg-type]
    assert lane_tokens(context(CUDAGraphMode.NONE, 7), 7) == ((7,),)  # type: ignore[arg-type]
    assert step_kind(split, GraphPhase.CAPTURE, dummy=True) is StepKind.CAPTURE  # type: ignore[arg-type]
    assert step_kind(split, GraphPhase.EAGER, dummy=True) is StepKind.DUMMY  # type: ignore[arg-type]
    assert step_kind(split, GraphPhase.EAGER, dummy=False) is StepKind.REAL  # type: ignore[arg-type]
