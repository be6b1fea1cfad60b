# SPDX-License-Identifier: Apache-2.0
"""Two-stage microbatching (vLLM's DBO) in the attention role, also without data parallelism.

vLLM runs two halves of a batch in two threads that alternate strictly. Here a half gives way after it has sent
its rows, so attention of one half runs on the GPU while the FFN computes for the other. Both halves share one
stream: a push waits for nobody, so no order of pushes and waits can be circular, whatever the sizes.

vLLM decides about a split together with its other data-parallel ranks and does not split without them;
:func:`should_split` decides for a lane alone, by vLLM's own thresholds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import CUDAGraphMode, ParallelConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper
from vllm.v1.worker.ubatch_utils import check_ubatch_thresholds, is_last_ubatch_empty
from vllm.v1.worker.utils import AttentionGroup

STAGES = 2


def enable(vllm_config: VllmConfig) -> None:
    """Switch vLLM's microbatching on in this worker process, before its device is initialised.

    The configuration was validated before, in a process of its own: vLLM's assertion about all-to-all backends is
    about expert parallelism, which the attention role has not. Cascade attention cannot be split.
    """
    vllm_config.parallel_config.enable_dbo = True
    vllm_config.model_config.disable_cascade_attn = True


def should_split(parallel: ParallelConfig, tokens: int, padded: int, uniform_decode: bool) -> bool:
    """Whether a batch of ``tokens`` rows, padded to ``padded``, runs in two stages.

    The threshold is compared with the padded size, which names the graph: a size is either split whenever it
    occurs or never.
    """
    if not check_ubatch_thresholds(parallel, padded, uniform_decode):
        return False
    return not is_last_ubatch_empty(tokens, padded, STAGES)


def separate_metadata(groups: Sequence[Sequence[AttentionGroup]]) -> None:
    """Let every stage build attention metadata of its own.

    vLLM 0.28.0's ``_build_attention_metadata`` keeps the metadata of a backend that can exchange its block table
    (FlashAttention) for the next KV cache group with the same specification, but the key does not name the stage:
    the second stage then gets the first one's query positions with its own block table, which is an error where
    the stages have different numbers of requests, and wrong where they have not. With the exchange declared
    impossible, every stage is built for itself; models with several such groups pay a second build.
    """
    for group in (group for of_cache in groups for group in of_cache):
        for builder in group.metadata_builders:
            builder.supports_update_block_table = False


def end_with_any_stage(end: Callable[[BaseException], None]) -> None:
    """Call ``end`` when a thread dies of an exception.

    The two stages of vLLM's wrapper wait for each other without a bound, so one that dies would leave the other, and
    with it the worker, waiting for ever.
    """
    native = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        native(arguments)
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            end(arguments.exc_value)

    threading.excepthook = hook


class LaneUBatchWrapper(UBatchWrapper):
    """vLLM's wrapper, for one lane as well: the native call asserts that there are other data-parallel ranks."""

    @classmethod
    def replacing(cls, native: UBatchWrapper) -> LaneUBatchWrapper:
        """A wrapper of the same model in the same mode; ``native`` has captured nothing yet."""
        mode = CUDAGraphMode.NONE if native.cudagraph_wrapper is None else CUDAGraphMode.FULL
        runnable: Callable[..., Any] = native.runnable
        return cls(runnable, native.vllm_config, mode, native.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        slices = context.ubatch_slices
        if slices is None or context.dp_metadata is not None:
            return super().__call__(*args, **kwargs)  # type: ignore[no-untyped-call]
        full = context.cudagraph_runtime_mode is CUDAGraphMode.FULL
        captured = self.cudagraphs.get(sum(part.num_tokens for part in slices)) if full else None
        if captured is not None:
            captured.cudagraph.replay()
            return captured.outputs
        stages = self._make_ubatch_metadata(
            ubatch_slices=slices,
            attn_metadata=context.attn_metadata,
            slot_mapping=context.slot_mapping,
            input_ids=kwargs["input_ids"],
            positions=kwargs["positions"],
            inputs_embeds=kwargs["inputs_embeds"],
            intermediate_tensors=kwargs["intermediate_tensors"],
            compute_stream=torch.cuda.current_stream(),
            dp_metadata=[None] * len(slices),
            batch_descriptor=context.batch_descriptor,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
        )
        with self.sm_control:
            if full:
                return self._capture_ubatches(stages, self.runnable)
            return self._run_ubatches(stages, self.runnable)
