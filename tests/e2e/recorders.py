# SPDX-License-Identifier: Apache-2.0
"""Test-only worker classes that log what the scheduler asked of each step, for native and AFD runs alike.

Two runs are comparable to the bit only where they batch alike; the logs say whether they did.
"""

import json
import os
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from afd_plugin.v1.worker.cpu_attention_worker import CPUAFDAttentionWorker

LOG_VARIABLE = "AFD_E2E_STEP_LOG"


def log_step(scheduled: SchedulerOutput, prompt_tokens: dict[str, int]) -> None:
    """Append one line: tokens by request in order of admission, and how many requests stay inside their prompt."""
    for request in scheduled.scheduled_new_reqs:
        prompt_tokens[request.req_id] = len(request.prompt_token_ids or ())
    computed = {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
    cached = scheduled.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    counts = scheduled.num_scheduled_tokens
    order = {request: position for position, request in enumerate(prompt_tokens)}
    line = {
        "tokens": [counts[request] for request in sorted(counts, key=order.__getitem__)],
        "partial_prefills": sum(
            computed[request] + count < prompt_tokens[request] for request, count in counts.items()
        ),
        "cached_prompt_tokens": sum(request.num_computed_tokens for request in scheduled.scheduled_new_reqs),
    }
    with open(os.environ[LOG_VARIABLE], "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


class NativeRecorder(CPUWorker):
    """vLLM's own CPU worker with a step log."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            log_step(scheduler_output, self.__dict__.setdefault("prompt_tokens", {}))
        return super().execute_model(scheduler_output)


class AttentionRecorder(CPUAFDAttentionWorker):
    """AFD's CPU attention worker with the same log."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            log_step(scheduler_output, self.__dict__.setdefault("prompt_tokens", {}))
        return super().execute_model(scheduler_output)
