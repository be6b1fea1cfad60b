# SPDX-License-Identifier: Apache-2.0
"""The attention worker on CUDA, under the class path the RFC fixes.

On a GPU a failure of the peer shows only after the fact: the wait for its answer is released, and what the
rest of the step then computes is no result. So no output leaves this worker before the planes have been
checked once more, after its tokens have reached the host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.utils.torch_utils import current_stream
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from afd_plugin.v1.worker import microbatching
from afd_plugin.v1.worker.attention_model_runner import AFDAttentionModelRunner
from afd_plugin.v1.worker.attention_role import AttentionWorkerMixin, told

if TYPE_CHECKING:
    from afd_plugin.v1.worker.attention_role import StepOutput


class CheckedOutput(AsyncModelRunnerOutput):
    """A native asynchronous output that is handed on only if nothing had failed when its tokens arrived."""

    def __init__(
        self, inner: AsyncModelRunnerOutput, arrived: Callable[[AsyncModelRunnerOutput], ModelRunnerOutput]
    ) -> None:
        self._inner = inner
        self._arrived = arrived

    def get_output(self) -> ModelRunnerOutput:
        return self._arrived(self._inner)


class AFDAttentionWorker(AttentionWorkerMixin, Worker):
    """vLLM's GPU worker in the attention role."""

    runner_class = AFDAttentionModelRunner

    def init_device(self) -> None:
        """Native, after microbatching has been switched on where it was asked for."""
        if self.afd_config.microbatches > 1:
            microbatching.enable(self.vllm_config)
            microbatching.end_with_any_stage(self._end)
        super().init_device()
        current_stream()  # vLLM's own stream from now on, so that no step is ordered against another one's stream

    def _end(self, error: BaseException) -> None:
        """End this process because a stage of a step has died; vLLM's executor sees a worker that is gone."""
        self._fail(error)
        self._abort_data_plane()
        sys.stderr.flush()
        os._exit(1)

    def _checked(self, output: StepOutput) -> StepOutput:
        if self.link is None or output is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return CheckedOutput(output, self._arrived)
        self.link.check()
        return output

    @told
    def _arrived(self, output: AsyncModelRunnerOutput) -> ModelRunnerOutput:
        """Wait for the tokens of a step, on a thread of vLLM's own."""
        try:
            return output.get_output()
        finally:
            # a failure that is known forbids an answer, and explains an error
            if self.link is not None:
                self.link.check()
