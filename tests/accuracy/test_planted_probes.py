# SPDX-License-Identifier: Apache-2.0
"""The numeric probe catches each planted fault, row by row, also the one that few answers would show."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from qualify.accuracy.architectures import ARCHITECTURES, Architecture
from tests.accuracy.comparing import Layer, Probe, compare
from tests.accuracy.planted import DROPPED_ONE_IN, Fault, checkpoint
from tests.accuracy.probed import ENGINE, probed_afd, probed_native

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CASES = [
    pytest.param(name, fault, id=f"{name.removeprefix('trained-')}-{fault.value}")
    for name, architecture in ARCHITECTURES.items()
    for fault in Fault
    if fault.possible(architecture)
]


@pytest.fixture(scope="module")
def native(
    python: Path, trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Probe]:
    """Each model's native side, run when it is first asked for."""

    class Made(dict[str, Probe]):
        def __missing__(self, name: str) -> Probe:
            self[name] = probed_native(python, trained[name], tmp_path_factory.mktemp("probed") / name)
            return self[name]

    return Made()


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_each_planted_fault_shows_in_rows_of_the_same_tokens_and_a_right_ffn_shows_none(
    name: str,
    fault: Fault,
    python: Path,
    trained: dict[str, Path],
    native: Mapping[str, Probe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    architecture, model = ARCHITECTURES[name], trained[name]
    wrong = checkpoint(fault, architecture, model, tmp_path / "wrong" / model.name)
    afd = probed_afd(python, model, tmp_path / "afd", monkeypatch, fault, wrong)
    layers = compare(native[name], afd)
    faults = [sentence for layer in layers for sentence in layer.faults(ENGINE.dtype)]
    changed = sum(left != right for left, right in zip(native[name].tokens, afd.tokens, strict=True))
    print(f"PROBE {name} {fault.value}: {changed} of {len(afd.tokens)} answers changed")
    print(*(f"PROBE   {sentence}" for sentence in faults), sep="\n")
    if fault is Fault.NONE:
        assert faults == []
        assert changed == 0
        assert all(layer.exact for layer in layers)
        return
    assert begins_in_the_experts(layers, architecture)
    if fault is Fault.ROWS_DROPPED:
        lost = {layer.name: layer.lost for layer in layers if layer.lost}
        assert set(lost) <= {f"mlp-{index}" for index in architecture.moe_layers}
        # One row of every hundredth exchange: an answer's tokens but those of its prompt are an exchange each.
        exchanges = len(architecture.moe_layers) * len(layers[0].errors)
        assert 1 <= sum(lost.values()) <= exchanges / DROPPED_ONE_IN + 1
    else:
        assert sum(layer.lost for layer in layers) == 0 or fault is Fault.LAST_LAYER_LATE


def begins_in_the_experts(layers: list[Layer], architecture: Architecture) -> bool:
    """Whether what is wrong is seen in the output of experts, and the layers before them, which see tokens alone, are
    right.
    """
    by_name = {layer.name: layer.faults(ENGINE.dtype) for layer in layers}
    first = min(architecture.moe_layers)
    before = [
        fault for index in range(first) for fault in by_name[f"layer-{index}"] + by_name[f"mlp-{index}"]
    ]
    return not before and any(by_name[f"mlp-{index}"] for index in architecture.moe_layers)
