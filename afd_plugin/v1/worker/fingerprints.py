# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a process, from its vLLM configuration and its built model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
import vllm
from vllm.config import CUDAGraphMode, VllmConfig

import afd_plugin
from afd_plugin.config import AFDConfig
from afd_plugin.control.fingerprint import Fingerprint
from afd_plugin.plan import RemoteUnit
from afd_plugin.topology import Topology

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Entries of a Hugging Face configuration that say where or by what it was written, not what the model is."""


def model_config_hash(vllm_config: VllmConfig) -> str:
    """SHA-256 over the model's own configuration, independent of the path it was loaded from."""
    plain = json.loads(vllm_config.model_config.hf_config.to_json_string(use_diff=False))
    for key in _NOT_THE_MODEL:
        plain.pop(key, None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def model_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """The type of the model's activations; a name in that field would be one that vLLM has not resolved."""
    dtype = vllm_config.model_config.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"vLLM left the model's dtype as {dtype!r} instead of a torch.dtype")
    return dtype


def graph_mode(vllm_config: VllmConfig) -> CUDAGraphMode:
    """The effective graph mode; eager where vLLM left it open."""
    mode: CUDAGraphMode | None = vllm_config.compilation_config.cudagraph_mode
    return CUDAGraphMode.NONE if mode is None or vllm_config.model_config.enforce_eager else mode


def _apart(topology: Topology) -> dict[str, str]:
    """Layouts in which processes of a role share no vLLM world; empty where there are none."""
    found = {}
    if topology.ffn_shards > 1:
        found["ffn_shards"] = str(topology.ffn_shards)
    if topology.independent_lanes:
        found["independent_lanes"] = "true"
    return found


def fingerprint(
    vllm_config: VllmConfig, config: AFDConfig, units: Sequence[RemoteUnit], devices: Sequence[str] = ()
) -> Fingerprint:
    """What this process was started with; compared with every peer before weights load."""
    model_config = vllm_config.model_config
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes
    mode = graph_mode(vllm_config)
    return Fingerprint(
        plugin_version=afd_plugin.__version__,
        vllm_version=vllm.__version__,
        model_config_hash=model_config_hash(vllm_config),
        dtype=str(model_config.dtype),
        hidden_size=model_config.get_hidden_size(),
        units=tuple(units),
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        gate=config.gate.value,
        dense=config.dense.value,
        shared_experts=config.shared.value,
        connector=config.connector,
        graph_mode=mode.name,
        capture_sizes=tuple(sizes or ()) if mode is not CUDAGraphMode.NONE else (),
        microbatches=config.microbatches,
        attention_dp=config.topology.attention_dp,
        attention_tp=config.topology.attention_tp,
        ffn_dp=config.topology.ffn_dp,
        ffn_tp=config.topology.ffn_tp,
        expert_parallel=config.topology.expert_parallel,
        extra=_apart(config.topology),
        model=model_config.model,
        devices=tuple(devices),
    )
