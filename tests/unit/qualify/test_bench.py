# SPDX-License-Identifier: Apache-2.0
import io
from dataclasses import asdict

import pytest
from rich.console import Console

from qualify.bench.__main__ import main, show
from qualify.bench.cpu import Quantiles, ServiceCost, Spread, cost, interleave

REPORTS = {
    "attention-0-0": {
        "exchanges": 4,
        "exchanges_per_step": 2,
        "messages_sent": 4,
        "recent_exchange_s": [0.0030, 0.0020, 0.0021, 0.0022],
    },
    "ffn-0-0": {"recent_compute_s": [0.0010, 0.0015, 0.0016, 0.0018]},
}


def test_measurements_take_turns_in_alternating_order_and_the_first_turn_is_not_counted() -> None:
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    found = interleave({"a": lambda: measure("a"), "b": lambda: measure("b")}, 2)
    assert "".join(calls) == "baabba"
    assert found == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_an_exchange_costs_what_attention_waited_beyond_what_the_ffn_computed() -> None:
    found = cost([6.0, 7.0, 20.0], [4.0, 5.0, 6.0], REPORTS)
    assert found.step_ms == Spread(7.0, 6.0, 20.0)
    assert found.step_over_native == 1.4
    assert found.growth_per_exchange_ms == 1.0
    assert found.messages_per_exchange == 1.0
    assert found.beyond_compute_per_exchange_ms == Quantiles(0.5, 0.5, 0.5, 0.85, 4)


def test_native_exchanges_nothing() -> None:
    assert cost([4.0], [4.0], {}) == ServiceCost(Spread(4.0, 4.0, 4.0))


def test_reports_of_different_lives_cannot_be_paired() -> None:
    shorter = REPORTS | {"ffn-0-0": {"recent_compute_s": [0.001]}}
    with pytest.raises(ValueError, match="shorter"):
        cost([6.0], [4.0], shorter)


def test_the_table_shows_median_tail_and_mean() -> None:
    costs = {"native": cost([4.0], [4.0], {}), "gate-on-ffn": cost([6.0], [4.0], REPORTS)}
    out = io.StringIO()
    result = {"model": "m", "repeats": 1, "tokens": 9, "limit_ms": 0.4}
    show(
        result | {"services": {name: asdict(one) for name, one in costs.items()}},
        Console(file=out, width=140),
    )
    assert "0.500 (0.500, 0.850)" in out.getvalue()
    assert "at most 0.4 ms" in out.getvalue()


def test_an_unknown_lane_is_a_bad_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tpu"]) == 2
    assert "'tpu'" in capsys.readouterr().err
