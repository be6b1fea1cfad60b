# SPDX-License-Identifier: Apache-2.0
"""The FFN worker of the CPU lane."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from afd_plugin.v1.worker.ffn_model_runner import FFNModelRunner
from afd_plugin.v1.worker.ffn_role import FFNWorkerMixin


class CPUFFNModelRunner(FFNModelRunner):
    """The CPU lane's FFN runner."""


class CPUAFDFFNWorker(FFNWorkerMixin, CPUWorker):
    """vLLM's CPU worker in the FFN role."""

    runner_class = CPUFFNModelRunner
