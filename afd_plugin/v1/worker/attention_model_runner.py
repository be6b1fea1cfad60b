# SPDX-License-Identifier: Apache-2.0
"""The attention role's model runner on CUDA, under the class path the RFC fixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

from afd_plugin.v1.worker.attention_link import AttentionLink
from afd_plugin.v1.worker.attention_role import AttentionRunnerMixin
from afd_plugin.v1.worker.microbatching import LaneUBatchWrapper, separate_metadata, should_split


class AFDAttentionModelRunner(AttentionRunnerMixin, GPUModelRunner):
    """vLLM's V1 runner with announced steps, and microbatches without data parallelism as well."""

    def announce_steps(self, link: AttentionLink) -> None:
        if isinstance(self.model, UBatchWrapper):
            self.model = LaneUBatchWrapper.replacing(self.model)
        super().announce_steps(link)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Native; the stages of a split batch must not share attention metadata."""
        super().initialize_kv_cache(*args, **kwargs)
        if self.parallel_config.use_ubatching:
            separate_metadata(self.attn_groups)

    def _determine_batch_execution_and_padding(  # type: ignore[override]  # the rest is passed by name
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray[Any, Any],
        max_num_scheduled_tokens: int,
        use_cascade_attn: bool,
        allow_microbatching: bool = True,
        **options: Any,
    ) -> tuple[CUDAGraphMode, BatchDescriptor, bool, torch.Tensor | None, CUDAGraphStat | None]:
        """Native; a lane without data-parallel peers decides alone whether to split the batch."""
        mode, descriptor, split, across_ranks, statistics = super()._determine_batch_execution_and_padding(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_scheduled_tokens_np=num_scheduled_tokens_np,
            max_num_scheduled_tokens=max_num_scheduled_tokens,
            use_cascade_attn=use_cascade_attn,
            allow_microbatching=allow_microbatching,
            **options,
        )
        if self.parallel_config.use_ubatching and self.parallel_config.data_parallel_size == 1:
            uniform = self._is_uniform_decode(
                max_num_scheduled_tokens=max_num_scheduled_tokens,
                uniform_decode_query_len=self.uniform_decode_query_len,
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                force_uniform_decode=options.get("force_uniform_decode"),
            )
            split = allow_microbatching and should_split(
                self.parallel_config, num_tokens, descriptor.num_tokens, uniform
            )
        return mode, descriptor, split, across_ranks, statistics
