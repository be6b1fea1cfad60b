# SPDX-License-Identifier: Apache-2.0
"""The engine arguments that a native run and an AFD run share, as Python arguments and as command line.

Both are built from one frozen object, so the two sides of a comparison cannot drift apart.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class EngineArguments:
    """vLLM engine arguments by their `vllm.EngineArgs` names.

    `max_num_batched_tokens` (tokens per step) is smaller than the longer prompts, so prefills are chunked.
    """

    dtype: str = "bfloat16"
    max_model_len: int = 512
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    seed: int = 0
    enforce_eager: bool = True
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    tensor_parallel_size: int = 1

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for `vllm.LLM` (the executor is not among them)."""
        return asdict(self)

    def flags(self) -> list[str]:
        """The same as command-line options of vLLM's server."""
        return [*self.serving_flags(), "--tensor-parallel-size", str(self.tensor_parallel_size)]

    def serving_flags(self) -> list[str]:
        """`flags` without parallel sizes, which `afd serve` takes for each role by itself."""
        flags: list[str] = []
        for name, value in asdict(self).items():
            option = name.replace("_", "-")
            if name == "tensor_parallel_size":
                continue
            if isinstance(value, bool):
                flags.append(f"--{option}" if value else f"--no-{option}")
            else:
                flags += [f"--{option}", str(value)]
        return flags


CPU_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_MLA_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Environment of every process on the CPU cell, native and AFD alike."""
