# SPDX-License-Identifier: Apache-2.0
"""The FFN worker on CUDA, under the class path the RFC fixes."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from afd_plugin.v1.worker.ffn_graphs import GraphedFFNService
from afd_plugin.v1.worker.ffn_model_runner import GPUFFNModelRunner
from afd_plugin.v1.worker.ffn_role import FFNWorkerMixin


class AFDFFNWorker(FFNWorkerMixin, Worker):
    """vLLM's GPU worker in the FFN role."""

    runner_class = GPUFFNModelRunner
    service_class = GraphedFFNService
