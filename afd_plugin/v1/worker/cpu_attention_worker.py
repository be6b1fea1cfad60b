# SPDX-License-Identifier: Apache-2.0
"""The attention worker of the CPU lane."""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from afd_plugin.v1.worker.attention_role import AttentionRunnerMixin, AttentionWorkerMixin


class CPUAFDAttentionModelRunner(AttentionRunnerMixin, CPUModelRunner):
    """vLLM's CPU runner with announced steps."""


class CPUAFDAttentionWorker(AttentionWorkerMixin, CPUWorker):
    """vLLM's CPU worker in the attention role."""

    runner_class = CPUAFDAttentionModelRunner
