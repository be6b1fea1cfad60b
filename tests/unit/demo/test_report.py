# SPDX-License-Identifier: Apache-2.0
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from afd_plugin.demo.parity import Parity
from afd_plugin.demo.recipes import DEEPSEEK_V2, QWEN3_MOE
from afd_plugin.demo.report import Outcome, print_report, write_report
from afd_plugin.demo.runner import outcome_of
from afd_plugin.demo.service import ServiceError

PARITY = Parity(8, 8, 768, 768, 0.0)
GOOD = Outcome(PARITY, 1000, 400, 602, 0, 2.5, 3.5, 3.0, "MHA path")


def printed(outcome: Outcome) -> str:
    stream = io.StringIO()
    print_report({"deepseek-v2": outcome}, Console(file=stream, width=160))
    return stream.getvalue()


def test_the_report_has_exactly_the_prescribed_shape(tmp_path: Path) -> None:
    write_report({"deepseek-v2": replace(GOOD, note="")}, {"cell": {"name": "cpu"}}, tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["checkpoints"] == {
        "deepseek-v2": {
            "requests": 8,
            "equal_token_lists": 8,
            "logprob_entries": 768,
            "bitwise_equal": 768,
            "max_abs_dlogprob": 0.0,
            "native_bytes": 1000,
            "attention_bytes": 400,
            "ffn_bytes": 602,
            "attention_expert_bytes": 0,
            "ms_per_step": {"native": 2.5, "afd": 3.5},
            "exchanges_per_step": 3.0,
        }
    }
    assert content["cell"] == {"name": "cpu"}


def test_the_table_fits_80_columns_and_names_every_measure() -> None:
    stream = io.StringIO()
    print_report(
        dict.fromkeys(("deepseek-v2", "deepseek-v3", "qwen3-moe"), GOOD), Console(file=stream, width=80)
    )
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("│")]
    assert len(lines) == 11  # a wrapped or cut cell would make more, or lose its words
    assert any("log-probabilities, same bits" in line and line.count("768 of 768") == 3 for line in lines)
    assert "…" not in stream.getvalue()


def test_a_good_outcome_has_no_fault_and_says_so() -> None:
    assert GOOD.faults() == []
    text = printed(GOOD)
    assert "agree to the last bit" in text
    assert "deepseek-v2: MHA path" in text


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (replace(GOOD, parity=Parity(8, 7, 768, 768, 0.0)), "1 of 8 answers differ"),
        (replace(GOOD, parity=Parity(8, 8, 768, 767, 0.01)), "1 of 768 log-probabilities differ"),
        (replace(GOOD, attention_expert_bytes=2), "2 bytes of expert weights"),
        (replace(GOOD, ffn_bytes=580), "roles hold 980 bytes"),
        (replace(GOOD, ffn_bytes=611), "roles hold 1011 bytes"),
        (replace(GOOD, exchanges_per_step=0), "no exchange"),
    ],
)
def test_every_broken_promise_is_a_fault_and_is_printed(outcome: Outcome, sentence: str) -> None:
    assert [sentence in fault for fault in outcome.faults()] == [True]
    text = " ".join(printed(outcome).split())
    assert sentence in text
    assert "agree to the last bit" not in text


ATTENTION = {"weight_bytes": 400, "expert_bytes": 0, "exchanges_per_step": 3.0}
FFN = {"weight_bytes": 300, "expert_bytes": 300, "exchanges_per_step": 3.0}


def test_bytes_are_summed_over_the_workers_of_a_role() -> None:
    reports = {"attention-0-0": ATTENTION, "ffn-0-0": FFN, "ffn-0-1": FFN}
    outcome = outcome_of(DEEPSEEK_V2, PARITY, 1000, reports, {"native": 1.23456, "afd": 2.0})
    assert (outcome.attention_bytes, outcome.ffn_bytes, outcome.attention_expert_bytes) == (400, 600, 0)
    assert (outcome.native_ms_per_step, outcome.exchanges_per_step) == (1.235, 3.0)
    assert "MHA path" in outcome.note


def test_a_model_with_no_mla_carries_no_note() -> None:
    reports = {"attention-0-0": ATTENTION, "ffn-0-0": FFN}
    assert not outcome_of(QWEN3_MOE, PARITY, 700, reports, {"native": 1.0, "afd": 1.0}).note


def test_a_role_that_reported_nothing_is_an_error_not_a_zero() -> None:
    with pytest.raises(ServiceError, match="attention-0-0"):
        outcome_of(DEEPSEEK_V2, PARITY, 1000, {"attention-0-0": ATTENTION}, {"native": 1.0, "afd": 1.0})
