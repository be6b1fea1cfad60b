# SPDX-License-Identifier: Apache-2.0
"""The one command of a lease: what it runs, that it fits, and what it writes when it does not."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qualify.gpu import __main__ as command
from qualify.gpu import clients, engines, exchange_bench, parity, parts, speed, switches
from qualify.gpu.__main__ import Recorder
from qualify.gpu.cell import CELLS
from qualify.gpu.host import Host
from qualify.gpu.plans import PLANS, Stage


def host(tmp_path: Path, left: float = 500.0, gpus: int = 1, **settings: object) -> Host:
    return Host(tmp_path, time.monotonic() + left, settings, gpus)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_names_parts_that_exist_and_fits_into_one_command(name: str) -> None:
    plan = PLANS[name]
    assert plan.cell in CELLS
    assert {part for stage in plan.stages for part in stage.parts} <= set(command.PARTS)
    if name != "one-gpu-idle":  # ten minutes of nothing are its purpose
        assert plan.seconds <= 550


def test_what_measures_time_or_memory_is_alone() -> None:
    alone = {"exchange", "bench", "timeline", "endurance", "serving"}
    for plan in PLANS.values():
        for stage in plan.stages:
            assert len(stage.parts) == 1 or not alone & set(stage.parts)


def test_a_stage_writes_what_came_of_each_part_and_fails_with_any(tmp_path: Path) -> None:
    def broken(host: Host) -> None:
        raise RuntimeError("no such kernel")

    bodies = {"good": lambda host: {"passed": True}, "bad": lambda host: {"passed": False}, "broken": broken}
    recorder = Recorder(tmp_path, {"gpus": ["x"]}, bodies)
    assert recorder.stage(Stage(("good",), 1), host(tmp_path))
    assert not recorder.stage(Stage(("good", "bad"), 1), host(tmp_path))
    assert not recorder.stage(Stage(("broken",), 1), host(tmp_path))
    assert json.loads((tmp_path / "good.json").read_text())["result"] == {"passed": True}
    assert "no such kernel" in json.loads((tmp_path / "broken.json").read_text())["error"]


def test_a_stage_without_time_is_written_down_as_not_run_and_fails(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {}, {"late": lambda host: {"passed": True}})
    assert not recorder.stage(Stage(("late",), 300), host(tmp_path, left=20))
    written = json.loads((tmp_path / "late.json").read_text())
    assert written["error"].startswith("not run:")
    assert "result" not in written


def test_settings_of_a_stage_yield_to_those_of_the_command(tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    recorder = Recorder(tmp_path, {}, {"part": lambda host: seen.update(host.settings)})
    recorder.stage(Stage(("part",), 1, {"workers": 8, "cases": "nvlink"}), host(tmp_path, workers=2))
    assert seen == {"workers": 2, "cases": "nvlink"}


def test_lists_of_cells_are_chosen_by_name_or_spelt_out() -> None:
    assert len(parity.chosen([])) == 12
    spelt = parity.chosen([{"model": "qwen3-moe", "mode": "graph", "microbatches": 2}])
    assert [case.name for case in spelt] == ["qwen3-moe-graph-gate-ffn-dbo"]
    names = [case.name for case in parity.chosen("nvlink")]
    assert len(set(names)) == len(names) == 19
    ends = {name.partition("gate-")[2].split("-")[1] for name in names}
    assert ends == {"nccl", "nvlink", "attention", "shards2"}


def test_prompts_of_the_clients_share_beginnings_and_reach_both_ends() -> None:
    prompts = clients.prompts()
    assert prompts == clients.prompts()
    assert len(prompts) == 256
    assert (len(prompts[0]), len(prompts[1])) == (1, 2000)
    assert min(map(len, prompts)) >= 1
    assert max(map(len, prompts)) <= clients.LONGEST
    longest = max(map(len, prompts)) + 4 + 12
    assert longest <= clients.ENGINE["max_model_len"]
    assert sum(len(prompt) > clients.ENGINE["max_num_batched_tokens"] for prompt in prompts) > 100
    shared = [
        index for index, prompt in enumerate(prompts)
        if any(prompt[:16] == other[:16] for other in prompts[:index] if len(prompt) >= 16 <= len(other))
    ]  # fmt: skip
    assert len(shared) > 20


def test_two_gpus_measure_every_way_of_moving_and_record_how_nccl_connects(tmp_path: Path) -> None:
    found = parts.setups(host(tmp_path, gpus=2))
    assert set(found) == {"ipc-push", "ipc-copy", "nccl-group", "nccl-plain", "nccl-group-no-p2p"}
    assert {setup.sizes for setup in found.values()} == {exchange_bench.TWO_GPUS}
    assert found["nccl-group-no-p2p"].environment["NCCL_P2P_DISABLE"] == "1"
    assert found["nccl-group"].environment["NCCL_P2P_DISABLE"] == "0"
    (tmp_path / "nccl-x-1.log").write_text(
        "h:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "h:1:1 [0] NCCL INFO Channel 01 : 1[1] -> 0[0] via SHM/direct/direct\nother\n"
    )
    assert exchange_bench.transports(tmp_path, "nccl-x-") == ["P2P/CUMEM", "SHM/direct/direct"]


def test_a_row_of_the_exchange_compares_both_ways_with_a_copy_one_way() -> None:
    row = exchange_bench.row(1024, 7168, [30e-6, 32e-6, 34e-6], 8e-6)
    assert row["round_trip_us"] == 32.0
    assert (row["low_us"], row["high_us"]) == (30.0, 34.0)
    assert row["share_of_copy_bandwidth"] == 0.5
    assert row["bytes_each_way"] == 1024 * 7168 * 2


def test_names_of_folders_stay_out_of_the_evidence() -> None:
    setup = exchange_bench.Setup("nccl-group", environment={"NCCL_DEBUG_FILE": "/a/b", "NCCL_DEBUG": "INFO"})
    assert exchange_bench.described(setup)["environment"] == {"NCCL_DEBUG": "INFO"}


def counted(eager: list[int], replayed: list[int]) -> dict[str, Any]:
    return {"device_steps": {"eager": eager, "replayed": replayed}}


def both(eager: list[int], replayed: list[int]) -> dict[str, Any]:
    return {role: counted(eager, replayed) for role in ("attention", "ffn")}


def test_what_may_differ_from_native_is_judged_within_its_spread_and_nothing_else() -> None:
    agreements = [{"largest_first_difference": 0.25, "equal_tokens": 90}]
    base = {"agreements": agreements, "exact": False, "tolerance": 0.5, "tokens_wanted": 90}
    base |= {"exit_codes": [{"a": 0, "a-ffn": 0}], **both([3, 3], [9, 9])}
    assert not parity.as_promised({"case": "qwen3-moe-graph-gate-ffn", **base})
    assert parity.as_promised({"case": "qwen3-moe-graph-gate-ffn-dbo", **base})
    assert parity.as_promised({"case": "qwen3-moe-graph-gate-ffn-shards2", **base})
    assert not parity.as_promised({"case": "x-shards2", **base, "tolerance": 0.1})
    assert not parity.as_promised({"case": "x-engines2", **base})
    assert not parity.as_promised({"case": "x-shards2", **base, "tokens_wanted": 91}), "a later step"
    exact = {**base, "exact": True}
    assert parity.as_promised({"case": "v2-graph-gate-ffn", **exact})
    assert not parity.as_promised(
        {"case": "v2-graph-gate-ffn", **exact, "exit_codes": [{"a": 0, "a-ffn": -9}]}
    )
    assert not parity.as_promised({"case": "x-shards2", "error": "it did not start", "exact": False})


@pytest.mark.parametrize("role", ["attention", "ffn"])
@pytest.mark.parametrize(
    ("case", "ran", "did_not"),
    [
        ("v2-eager-gate-ffn", ([3], [0]), ([0], [3])),
        ("v2-graph-gate-ffn", ([3], [9]), ([12], [0])),
        ("v2-graph-gate-ffn-nccl", ([3], [9]), ([], [])),
        ("v2-eager-gate-ffn-dbo", ([3, 2], [0, 0]), ([3, 0], [0, 0])),
        ("v2-graph-gate-ffn-dbo", ([3, 2], [9, 8]), ([3, 2], [9, 0])),
        ("v2-graph-gate-ffn-nccl-dbo", ([3, 2], [9, 8]), ([3], [9])),
    ],
)
def test_a_case_counts_only_if_both_devices_ran_steps_of_its_mode_and_stages(
    role: str, case: str, ran: tuple[list[int], list[int]], did_not: tuple[list[int], list[int]]
) -> None:
    exact = {"largest_first_difference": 0.0, "equal_tokens": 90}
    outcome = {"case": case, "agreements": [exact], "exact": True, "tolerance": 0.0, "tokens_wanted": 90}
    outcome |= {"exit_codes": [{"a": 0}], **both(*ran)}
    assert parity.as_promised(outcome)
    assert not parity.as_promised({**outcome, role: counted(*did_not)})


def test_a_native_engine_that_fails_leaves_the_cases_of_the_others_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [{"model": "deepseek-v2", "mode": "eager"}, {"model": "qwen3-moe", "mode": "eager"}]

    def natives(_host: Any, _model: Path, name: str, *_: Any) -> list[Any]:
        if name == "qwen3-moe":
            raise ValueError("no such engine")
        row = {"tokens": [1, 2], "logprobs": [[[1, -0.5]], [[2, -0.25]]]}
        return [[row], [row], [row]]

    def case(
        _host: Any, _model: Path, case: parity.ParityCase, references: Mapping[Any, Any]
    ) -> dict[str, Any]:
        references[case.reference].result()
        return {"case": case.name, "exact": True, "exit_codes": [{"a": 0}], **both([3], [0])}

    monkeypatch.setattr("afd_plugin.demo.checkpoints.make", lambda name: tmp_path / name)
    monkeypatch.setattr(parity, "_native_rows", natives)
    monkeypatch.setattr(parity, "_case", case)
    outcome = parity.parity(host(tmp_path, cases=cases))
    served, failed = outcome["cases"]
    assert served["exact"]
    assert failed["error"] == "ValueError: no such engine"
    assert list(outcome["native_against_itself"]) == ["deepseek-v2-eager"]
    assert outcome["passed"] is False


def test_layouts_without_a_common_world_are_among_the_cells() -> None:
    names = [case.name for case in parity.chosen("apart")]
    assert sum("-engines2" in name for name in names) == sum("-shards2" in name for name in names) == 4


def test_every_lever_says_what_is_expected_and_is_an_argument_that_exists() -> None:
    known = set(inspect.signature(engines.pair).parameters)
    for switch in switches.SWITCHES.values():
        assert len(switch.expectation) > 20
        assert set(switch.options) <= known
        assert switch.options or switch.environment
    with pytest.raises(KeyError):
        switches.chosen(["faster"])


def test_a_comparison_without_a_second_native_claims_no_spread_between_two() -> None:
    row = speed.ratios({"native-a": {1: [2.0, 2.2]}, "afd": {1: [3.0]}, "native-default": {1: [1.5]}})[1]
    assert "native_b_over_a" not in row
    assert row["afd_over_native-default"] == 2.0


def test_attention_of_two_ranks_shares_one_of_its_gpus_and_has_its_own_reference() -> None:
    case = parity.ParityCase("qwen3-moe", "graph", two_gpus=True, attention_tp=2)
    assert case.visible == ("0,1", "0")
    assert case.reference == ("qwen3-moe", "graph", 2)
    plain = parity.ParityCase("qwen3-moe", "graph", two_gpus=True)
    assert plain.visible == ("0,1", "1,0")
    assert plain.reference == ("qwen3-moe", "graph", 1)
    assert plain.rival(2) is None
    assert case.rival(2) == ("qwen3-moe", "graph", 1)


def test_split_experts_are_held_to_natives_own_slicing_where_two_gpus_can_form_it() -> None:
    case = parity.ParityCase("deepseek-v3", "graph", shards=2)
    assert case.rival(2) == ("deepseek-v3", "graph", 2)
    assert case.rival(1) is None
