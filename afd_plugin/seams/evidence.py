# SPDX-License-Identifier: Apache-2.0
"""The tests that the entries refer to, as pytest node ids, by what they exercise."""

from __future__ import annotations

_PARITY = (
    "tests/e2e/test_parity.py::test_tokens_and_logprobs_are_native_to_the_bit_and_every_role_owns_its_half"
)
_SERVICE = (
    "tests/e2e/test_service.py::"
    "test_one_command_serves_native_answers_and_stops_cleanly_with_the_real_interpreter"
)
_FAULTS = "tests/e2e/test_faults.py::test_a_planted_fault_fails_the_parity_check"

MODEL = (_PARITY, _FAULTS)
"""Role-scoped construction and loading: bytes held and read, and outputs that a wrong half would change."""

WORKER = (_PARITY, "tests/e2e/test_modes.py::test_every_mode_is_native_to_the_bit_under_equal_batches")
"""Life cycle and steps of both roles."""

SERVICE = (_SERVICE,)
"""The processes that `afd` starts."""

NATIVE = (_PARITY, _SERVICE)
"""The native side of a comparison."""

REFUSALS = ("tests/unit/cli/test_refusals.py",)
"""Options that AFD refuses."""

CONNECTORS = ("tests/unit/connectors/test_gloo.py", "tests/unit/connectors/test_tcp.py", _PARITY)
"""The data plane on the CPU."""

SHARDS = (
    (
        "tests/e2e/test_topologies.py::"
        "test_experts_split_over_processes_without_a_world_are_within_the_spread_of_native"
    ),
    _FAULTS,
)
"""Layers that hold a part of the experts."""

TRACING = ("tests/e2e/test_tracing_spans.py", "tests/unit/worker/test_step_tracing.py")
"""Spans of both roles."""

GPU = ("tests/gpu_e2e/test_contract.py",)
"""What only a machine with a GPU exercises."""

ISOLATION = (
    (
        "tests/e2e/test_isolation.py::"
        "test_registries_environment_and_modules_are_those_of_a_vllm_without_the_plugin"
    ),
    "tests/e2e/test_isolation.py::test_native_outputs_are_the_same_to_the_bit",
)
"""A process without an AFD worker is a native one; also the evidence for an entry point that anybody may use."""
