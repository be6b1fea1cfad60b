# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from afd_plugin.control import Fingerprint, diff
from afd_plugin.plan import RemoteUnit, UnitKind
from tests.unit.control.harness import fingerprint

UNITS = fingerprint().units


def lines(**changes: Any) -> tuple[str, ...]:
    return diff(fingerprint(), fingerprint(**changes), "FFN group 0", "attention lane 1")


def test_equal_fingerprints_do_not_differ() -> None:
    assert lines() == ()


def test_what_may_differ_does_not_count() -> None:
    assert lines(model="/another/path", devices=("GPU-1",)) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("plugin_version", "0.28.1"),
        ("vllm_version", "0.27.0"),
        ("model_config_hash", "beef"),
        ("dtype", "torch.float16"),
        ("hidden_size", 65),
        ("gate", "attention"),
        ("dense", "ffn"),
        ("shared_experts", "attention"),
        ("connector", "P2pNcclAFDConnector"),
        ("runner", "v2"),
        ("graph_mode", "FULL_DECODE_ONLY"),
        ("microbatches", 2),
        ("max_tokens", 1),
        ("attention_dp", 2),
        ("attention_tp", 2),
        ("ffn_dp", 2),
        ("ffn_tp", 2),
        ("expert_parallel", True),
    ],
)
def test_each_field_is_compared_and_both_values_are_shown(field: str, value: object) -> None:
    (line,) = lines(**{field: value})
    mine = getattr(fingerprint(), field)
    assert line == f"{field}: FFN group 0 has {mine}, attention lane 1 has {value}"


@pytest.mark.parametrize("field", Fingerprint.__struct_fields__)
def test_no_field_is_forgotten(field: str) -> None:
    other: Any = {
        "units": UNITS[:1],
        "capture_sizes": (1,),
        "extra": {"a": "b"},
        "expert_parallel": True,
        "devices": ("x",),
    }
    value = other.get(field, 12345 if isinstance(getattr(fingerprint(), field), int) else "something else")
    assert bool(lines(**{field: value})) is (field not in ("model", "devices"))


def test_units_are_compared_by_their_own() -> None:
    changed = (
        *UNITS[:2],
        replace(UNITS[2], router_logits=8),
        RemoteUnit(3, "model.layers.9.mlp", UnitKind.DENSE),
    )
    (line,) = lines(units=changed)
    assert line == (
        "units: FFN group 0 has 3 (2=model.layers.3.mlp.experts (experts)), attention lane 1 has "
        "4 (2=model.layers.3.mlp.experts (experts, 8 router logits), 3=model.layers.9.mlp (dense))"
    )


def test_another_order_of_units_is_a_difference() -> None:
    (line,) = lines(units=UNITS[::-1])
    assert "the order" in line


def test_long_lists_are_shortened() -> None:
    (line,) = lines(capture_sizes=tuple(range(500)))
    assert "492 more" in line
    assert len(line) < 200


def test_extra_facts_are_compared_by_name() -> None:
    assert lines(extra={"quantization": "fp8"}) == (
        "quantization: FFN group 0 has nothing, attention lane 1 has fp8",
    )
