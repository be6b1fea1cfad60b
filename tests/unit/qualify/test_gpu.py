# SPDX-License-Identifier: Apache-2.0
"""The parts of the GPU go that are arithmetic and text, and the build of the extension as data."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from qualify import csrc
from qualify.gpu import engines, host, parts, speed, workloads


def _rows(*answers: tuple[list[int], list[float]]) -> list[dict[str, object]]:
    return [
        {
            "tokens": tokens,
            "logprobs": [[[token, value]] for token, value in zip(tokens, values, strict=True)],
        }
        for tokens, values in answers
    ]


@pytest.mark.parametrize(
    ("exact", "tokens", "passed"),
    [(True, 8, True), (False, 8, False), (True, 7, False), (True, 0, False)],
)
def test_the_native_control_wants_exact_kernels_and_every_token(
    exact: bool, tokens: int, passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is short or empty is no service."""
    rows = [{"tokens": [1] * tokens}]
    engine = SimpleNamespace(receive=lambda _: {"ready": True}, ask=lambda *_, **__: rows)
    monkeypatch.setattr(parts.probe, "ask", lambda _: {"exact": exact})
    monkeypatch.setattr(parts, "native", lambda *_: nullcontext(engine))
    assert parts.control(host.Host(tmp_path, 0.0, {}))["passed"] is passed


def test_equal_answers_are_exact() -> None:
    rows = _rows(([4, 5], [-0.5, -0.25]), ([6, 7], [-1.0, -2.0]))
    agreement = workloads.compare(rows, rows)
    assert agreement.exact
    assert (agreement.tokens, agreement.logprobs) == (4, 4)


def test_one_bit_of_one_logprob_is_not_exact() -> None:
    agreement = workloads.compare(_rows(([4], [-0.5])), _rows(([4], [-0.5000001])))
    assert not agreement.exact
    assert agreement.equal_token_lists == 1
    assert 0 < agreement.largest_difference < 1e-6


def test_after_the_first_differing_token_nothing_is_compared() -> None:
    agreement = workloads.compare(
        _rows(([4, 5, 6], [-1.0, -1.0, -9.0])), _rows(([4, 9, 6], [-1.0, -1.0, -1.0]))
    )
    assert (agreement.equal_token_lists, agreement.equal_tokens) == (0, 2)
    assert agreement.logprobs == 2  # the third position follows different texts


def test_tokens_that_only_one_side_lists_count_with_the_least_they_can_differ_by() -> None:
    """Lists of candidates that have nothing in common are no agreement."""
    agreement = workloads.compare(
        [{"tokens": [4], "logprobs": [[[4, -0.1], [5, -3.0]]]}],
        [{"tokens": [4], "logprobs": [[[8, -1.0], [9, -2.0]]]}],
    )
    assert agreement.largest_first_difference == pytest.approx(2.0)


def test_a_logprob_that_is_not_finite_is_no_agreement() -> None:
    with pytest.raises(ValueError, match="not finite"):
        workloads.compare(_rows(([4], [float("nan")])), _rows(([4], [-1.0])))


def test_missing_answers_are_an_error_and_not_an_agreement() -> None:
    with pytest.raises(ValueError, match="1 answers against 0"):
        workloads.compare(_rows(([4], [-1.0])), [])


def test_prompts_are_the_same_in_every_process_and_fit_the_engine() -> None:
    prompts = workloads.parity_prompts()
    assert prompts == workloads.parity_prompts()
    assert len(prompts) == 64
    longest = max(map(len, prompts)) + workloads.PARITY_TOKENS + 8
    assert longest <= host.PARITY_ENGINE["max_model_len"]


def test_engine_arguments_become_options_of_the_same_meaning() -> None:
    words = engines.flags({"dtype": "bfloat16", "enforce_eager": False, "compilation_config": {"mode": 0}})
    assert words == ["--dtype", "bfloat16", "--no-enforce-eager", "--compilation-config", '{"mode": 0}']


def test_the_extension_is_built_for_every_promised_gpu_without_a_path_of_this_machine_in_its_sources() -> (
    None
):
    tools = csrc.Tools(Path("/t/bin/nvcc"), Path("/t"), Path("/torch"), Path("/py"))
    device, host, link = csrc.commands(tools, Path("/w"))
    for arch in (80, 90, 100):
        assert f"-gencode=arch=compute_{arch},code=sm_{arch}" in device
    assert "-gencode=arch=compute_100,code=compute_100" in device
    assert "csrc/exchange.cu" in device
    assert "csrc/ops.cpp" in host
    assert "-lcudart_static" in link


def test_ratios_are_bounded_by_what_native_does_against_itself() -> None:
    ratios = speed.ratios({"native-a": {1: [3.0, 3.1]}, "native-b": {1: [3.0, 3.3]}, "afd": {1: [3.6, 3.6]}})
    assert ratios[1]["native_spread"] == 1.1
    assert ratios[1]["afd_over_native"] == pytest.approx(3.6 / 3.05, abs=1e-3)


def test_every_engine_of_a_comparison_gets_a_ratio_and_the_default_mode_one_of_its_own() -> None:
    row = speed.ratios(
        {
            "native-a": {1: [2.0]}, "native-b": {1: [2.0]}, "afd": {1: [3.0]}, "native-default": {1: [1.5]},
        }
    )[1]  # fmt: skip
    assert row["afd_over_native"] == 1.5
    assert row["afd_over_native-default"] == 2.0
    assert row["native-default_over_native"] == 0.75
