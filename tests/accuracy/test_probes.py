# SPDX-License-Identifier: Apache-2.0
"""Layer by layer, AFD gives what native gives: norms, relative error, the routed and the shared part and their sum.

And over a thousand tokens it says the same, and degenerates no more than native does.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from qualify.accuracy import sides
from qualify.accuracy.architectures import ARCHITECTURES, DEEPSEEK_V3
from tests.accuracy.comparing import RELATIVE_ERROR, Probe, compare, relative_error
from tests.accuracy.parts import Kept, only
from tests.accuracy.probed import ENGINE, probed_afd, probed_native
from tests.e2e.services import afd_serve, running, vllm_serve

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONG = 1024


def check_layers(native: Probe, afd: Probe) -> None:
    assert native.tokens == afd.tokens
    layers = compare(native, afd)
    assert {layer.name.partition("-")[0] for layer in layers} == {"layer", "mlp"}
    for layer in layers:
        print(
            f"PROBE {layer.name}: {len(layer.errors)} rows, norm ratio {layer.norm_ratio:.6f}, "
            f"relative error {layer.errors.max():.2e}"
        )
        assert layer.faults(ENGINE.dtype) == []
        assert np.linalg.norm(native.outputs[layer.name]) > 0
        assert layer.exact  # this cell is equal to the bit


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer_gives_what_native_gives(
    name: str, python: Path, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = probed_native(python, trained[name], tmp_path / "native")
    check_layers(native, probed_afd(python, trained[name], tmp_path / "afd", monkeypatch))


def test_routed_and_shared_experts_alone_are_natives_and_add_up_to_the_whole(
    python: Path, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, first = trained[DEEPSEEK_V3.name], f"mlp-{DEEPSEEK_V3.moe_layers[0]}"
    found: dict[Kept, np.ndarray] = {}
    rows = prompt_rows(model)
    for kept in Kept:
        part = only(kept, model, tmp_path / kept.value / model.name)
        native = probed_native(python, part, tmp_path / f"{kept.value}-native")
        afd = probed_afd(python, part, tmp_path / f"{kept.value}-afd", monkeypatch)
        check_layers(native, afd)
        # The first prompt's tokens enter the first MoE layer alike, whatever its experts are.
        found[kept] = afd.outputs[first][:rows]
    summed = found[Kept.ROUTED] + found[Kept.SHARED]
    error = relative_error(summed, found[Kept.BOTH])
    print(f"PROBE routed + shared against both: relative error {error:.2e}")
    assert error <= 2 * RELATIVE_ERROR[ENGINE.dtype]
    assert relative_error(found[Kept.ROUTED], found[Kept.BOTH]) > 0.05
    assert relative_error(found[Kept.SHARED], found[Kept.BOTH]) > 0.05


def prompt_rows(model: Path) -> int:
    """Tokens of the first prompt, its BOS with it."""
    from afd_plugin.demo.prompts import PROMPTS

    return len(PROMPTS[0]) + 1


def repetition(tokens: Sequence[int], length: int = 4) -> float:
    """The share of the runs of `length` tokens that stood before."""
    runs = [tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1)]
    return 1 - len(set(runs)) / len(runs)


def entropy(tokens: Sequence[int]) -> float:
    """Bits a token, from the tokens' own frequencies."""
    counts = Counter(tokens)
    return -sum(n / len(tokens) * math.log2(n / len(tokens)) for n in counts.values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_thousand_tokens_are_natives_and_no_more_degenerate(
    name: str, python: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    said = {}
    for side, command in (("native", vllm_serve(python)), ("afd", afd_serve(python))):
        with running(
            command, trained[name], sides.ENGINE, tmp_path / side, native=side == "native"
        ) as service:
            generation, _ = service.endpoint.complete("Lqx,wm,xe,ew;q>", LONG)
        said[side] = generation.token_ids
        print(
            f"PROBE {name} {side}: {len(said[side])} tokens, repetition {repetition(said[side]):.3f}, "
            f"entropy {entropy(said[side]):.3f} bits"
        )
    assert len(said["afd"]) == LONG
    assert said["afd"] == said["native"]  # this cell is equal to the bit
    assert repetition(said["afd"]) <= repetition(said["native"]) + 0.01
    assert entropy(said["afd"]) >= 0.99 * entropy(said["native"])
