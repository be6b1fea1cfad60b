# SPDX-License-Identifier: Apache-2.0
"""Every topology with real processes: native to the bit where both shard and batch alike, else within native's spread.

What a row is compared with on the CPU cell (`Topology.native_reference` is the general rule):

=========  =============================================  =====================================================
row        processes                                      reference
=========  =============================================  =====================================================
2A1F       attention DP2, one FFN                         native TP1, to the bit, lane by lane
1A2F       one attention, FFN TP2                         native TP1, within the spread: no native engine on a
                                                          CPU shards its experts and not its attention
2A2F-TP    attention TP2, FFN TP2                         native TP2, to the bit
2A2F-DP    attention DP2, FFN DP2 (one flat world)        1A2F, to the bit: the same shards, rows of two lanes
4A2F       attention DP4, two FFN ranks, two lanes each   1A2F, to the bit
1A2F-S     one attention, the experts split over two FFN  native TP1, within the spread: partial outputs are
           processes without a common vLLM world          added in another order than any native engine adds
ENGINES    two attention engines of their own, one FFN    native TP1, to the bit, engine by engine
=========  =============================================  =====================================================

Native data parallelism, which would be the reference of the last rows, does not run on a CPU; that is a test of its
own, and so is expert parallelism. The spread is the largest difference between native engines on the same requests.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from afd_plugin.demo import parity
from afd_plugin.demo.client import Endpoint
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.faults import Fault, plant
from afd_plugin.demo.native import ALL_TOGETHER, reference
from afd_plugin.demo.prompts import PROMPTS
from afd_plugin.demo.recipes import RECIPES
from afd_plugin.demo.records import Record
from afd_plugin.demo.service import Command, Service
from afd_plugin.supervisor.ports import PortReservation
from afd_plugin.topology import Topology
from tests.e2e.harness import environment
from tests.e2e.services import afd_attention, afd_ffn, afd_serve, running
from tests.e2e.teardown import nothing_left

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

MODEL = "deepseek-v2"
ENGINE = EngineArguments()
TOKENS = 12
"""Generated for each prompt: fewer than the references have, since a greedy answer begins like a longer one."""

ENTRIES = len(PROMPTS) * TOKENS * 3
UNEVEN = (0, 0, 0, 1, 0, 2, 3, 1)
"""Which lane (modulo their number) gets which prompt when all are sent at once."""


@dataclass(frozen=True)
class Row:
    """One topology; `native_tp` is set where native vLLM with that tensor parallel size is equal to the bit."""

    name: str
    topology: Topology
    native_tp: int | None = None


R2A1F = Row("2A1F", Topology(attention_dp=2), native_tp=1)
R1A2F = Row("1A2F", Topology(ffn_tp=2))
R2A2F_TP = Row("2A2F-TP", Topology(attention_tp=2, ffn_tp=2), native_tp=2)
R2A2F_DP = Row("2A2F-DP", Topology(attention_dp=2, ffn_dp=2))
R4A2F = Row("4A2F", Topology(attention_dp=4, ffn_dp=2))
R1A2F_S = Row("1A2F-S", Topology(ffn_shards=2))
ROWS = (R2A1F, R1A2F, R2A2F_TP, R2A2F_DP, R4A2F, R1A2F_S)


@dataclass(frozen=True)
class Served:
    """What one service answered and what its workers counted."""

    alone: Record
    together: Record
    reports: dict[str, dict[str, Any]]


def options(topology: Topology) -> list[str]:
    """The parallel sizes as options of `afd`."""
    return [
        *("--attention-dp", str(topology.attention_dp), "--attention-tp", str(topology.attention_tp)),
        *("--ffn-dp", str(topology.ffn_dp), "--ffn-tp", str(topology.ffn_tp)),
        *("--ffn-shards", str(topology.ffn_shards)),
    ]


def lane(endpoint: Endpoint, topology: Topology, index: int) -> Endpoint:
    """The same server, with requests for one lane."""
    if topology.attention_dp == 1:
        return endpoint
    return replace(endpoint, data_parallel_rank=index % topology.attention_dp)


def ask_alone(endpoint: Endpoint, topology: Topology) -> Record:
    """One request in flight, lane after lane: every other lane runs dummies meanwhile."""
    return Record(
        tuple(
            lane(endpoint, topology, index).complete(prompt, TOKENS)[0]
            for index, prompt in enumerate(PROMPTS)
        )
    )


def ask_together(endpoint: Endpoint, topology: Topology) -> Record:
    """All requests at once, unevenly: lanes bring different numbers of rows to a step."""

    def ask(index: int) -> Any:
        return lane(endpoint, topology, UNEVEN[index]).complete(PROMPTS[index], TOKENS)[0]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return Record(tuple(pool.map(ask, range(len(PROMPTS)))))


def beginning(record: Record) -> Record:
    """The first tokens of every answer."""
    return Record(
        tuple(
            replace(one, token_ids=one.token_ids[:TOKENS], top_logprobs=one.top_logprobs[:TOKENS])
            for one in record.generations
        )
    )


def serve(row: Row, model: Path, python: Path, folder: Path) -> Served:
    """Run `row` behind `afd serve`, ask everything, stop it cleanly."""
    with running(afd_serve(python, options(row.topology)), model, ENGINE, folder) as service:
        alone = ask_alone(service.endpoint, row.topology)
        together = ask_together(service.endpoint, row.topology)
    return Served(alone, together, service.role_reports())


@contextmanager
def apart(row: Row, model: Path, ffn_model: Path, python: Path, folder: Path) -> Iterator[Service]:
    """`afd ffn` and `afd attention` as two commands, the FFN with a model of its own."""
    with PortReservation() as port:
        address = f"127.0.0.1:{port.port}"
    sizes = options(row.topology)
    with nothing_left(folder / "ffn") as traces:
        env = {"AFD_TOKEN": "t", **traces.environment}
        ffn = Service(
            afd_ffn(python, ["--listen", address, *sizes]),
            ffn_model,
            "m",
            ENGINE,
            folder / "ffn",
            environment(env),
        )
        attention = afd_attention(python, ["--peer", address, *sizes])
        with ffn, running(attention, model, ENGINE, folder / "attention", AFD_TOKEN="t") as service:
            yield service
        if ffn.stop():
            raise AssertionError(ffn.tail())


@pytest.fixture(scope="module")
def natives(checkpoints: dict[str, Path], python: Path) -> dict[int, Record]:
    """Native answers to one request at a time, by tensor parallel size."""
    return {
        size: beginning(
            reference(checkpoints[MODEL], replace(ENGINE, tensor_parallel_size=size), python=python)
        )
        for size in (1, 2)
    }


@pytest.fixture(scope="module")
def spread(checkpoints: dict[str, Path], python: Path, natives: dict[int, Record]) -> float:
    """The largest difference between native engines: of another TP size, of other batches."""
    together = beginning(reference(checkpoints[MODEL], ENGINE, ALL_TOGETHER, python=python))
    pairs = combinations([*natives.values(), together], 2)
    return max(parity.compare(left, right).max_abs_dlogprob for left, right in pairs)


@pytest.fixture(scope="module")
def split_experts(
    checkpoints: dict[str, Path], python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """1A2F."""
    return serve(R1A2F, checkpoints[MODEL], python, tmp_path_factory.mktemp("1A2F") / "afd")


def check_counts(row: Row, reports: dict[str, dict[str, Any]]) -> None:
    """All processes are there, took part in the same steps, and every message sent was received, lane by lane."""
    topology = row.topology
    assert set(reports) == {
        *(
            f"attention-{one}-{rank}"
            for one in range(topology.attention_dp)
            for rank in range(topology.attention_tp)
        ),
        *(f"ffn-{one}-{rank}" for one in range(topology.ffn_dp) for rank in range(topology.ffn_tp)),
    }
    steps = {sum(report["steps"].values()) for report in reports.values()}
    assert len(steps) == 1, "all ranks of both roles run the same steps"
    exchanges = steps.pop() * reports["attention-0-0"]["exchanges_per_step"]
    assert {report["exchanges"] for report in reports.values()} == {exchanges}
    for group in range(topology.ffn_dp):
        lanes = [reports[f"attention-{one}-0"] for one in topology.lanes_of(group)]
        leader = reports[f"ffn-{group}-0"]
        for sent, received in (("messages_sent", "messages_received"), ("bytes_sent", "bytes_received")):
            assert sum(report[sent] for report in lanes) == leader[received]
            assert sum(report[received] for report in lanes) == leader[sent]
        for rank in range(1, topology.ffn_tp):
            assert "messages_sent" not in reports[f"ffn-{group}-{rank}"]
    if topology.attention_dp > 1:
        for one in range(topology.attention_dp):
            assert reports[f"attention-{one}-0"]["steps"]["dummy"] > 0, "an idle lane runs dummies"
            assert reports[f"attention-{one}-0"]["steps"]["real"] > 0


def check_exact(expected: Record, found: Record) -> None:
    """Equal to the last bit, and as much as was asked for."""
    result = parity.compare(expected, found)
    assert (result.requests, result.equal_token_lists) == (len(PROMPTS), len(PROMPTS))
    assert result.bitwise_equal == result.logprob_entries == ENTRIES


def test_1a2f_is_within_the_spread_of_native(
    natives: dict[int, Record], spread: float, split_experts: Served
) -> None:
    check_counts(R1A2F, split_experts.reports)
    for found in (split_experts.alone, split_experts.together):
        assert parity.compare(natives[1], found).max_abs_dlogprob <= spread


def test_experts_split_over_processes_without_a_world_are_within_the_spread_of_native(
    checkpoints: dict[str, Path], python: Path, natives: dict[int, Record], spread: float, tmp_path: Path
) -> None:
    served = serve(R1A2F_S, checkpoints[MODEL], python, tmp_path / "afd")
    attention, *shards = (served.reports[name] for name in ("attention-0-0", "ffn-0-0", "ffn-1-0"))
    assert {report["exchanges"] for report in served.reports.values()} == {attention["exchanges"]}
    assert attention["messages_sent"] == sum(shard["messages_received"] for shard in shards)
    assert attention["messages_received"] == sum(shard["messages_sent"] for shard in shards)
    first, second = shards
    assert first["gate_bytes"] == second["gate_bytes"] > 0
    assert first["expert_bytes"] > second["expert_bytes"] > 0, "shared experts are the first shard's"
    for found in (served.alone, served.together):
        result = parity.compare(natives[1], found)
        assert result.requests == len(PROMPTS)
        assert result.max_abs_dlogprob <= spread


def test_engines_of_their_own_share_an_ffn_and_answer_as_native_to_the_bit(
    checkpoints: dict[str, Path], python: Path, natives: dict[int, Record], tmp_path: Path
) -> None:
    """The second one ends first; the first then goes on alone."""
    with PortReservation() as port:
        address = f"127.0.0.1:{port.port}"
    model = checkpoints[MODEL]
    one = Topology()
    with nothing_left(tmp_path / "ffn") as traces, ExitStack() as stack:
        env = {"AFD_TOKEN": "t", **traces.environment}

        def started(command: Command, name: str) -> Service:
            return stack.enter_context(
                Service(command, model, "m", ENGINE, tmp_path / name, environment(env))
            )

        ffn = started(afd_ffn(python, ["--listen", address, "--engines", "2"]), "ffn")
        engines = [
            started(afd_attention(python, ["--peer", address, "--engine", f"{index}/2"]), f"engine-{index}")
            for index in range(2)
        ]
        for engine in engines:
            engine.await_ready()
        with ThreadPoolExecutor(2) as pool:
            at_once = list(pool.map(lambda engine: ask_alone(engine.endpoint, one), engines))
        for answers in at_once:
            check_exact(natives[1], answers)
        assert engines[1].stop() == 0, engines[1].tail()
        check_exact(natives[1], ask_alone(engines[0].endpoint, one))
        assert engines[0].stop() == 0, engines[0].tail()
        assert ffn.stop() == 0, ffn.tail()


@pytest.mark.parametrize("row", [R2A1F, R2A2F_TP], ids=lambda row: row.name)
def test_a_row_that_native_shards_alike_is_native_to_the_bit(
    row: Row,
    checkpoints: dict[str, Path],
    python: Path,
    natives: dict[int, Record],
    spread: float,
    tmp_path: Path,
) -> None:
    assert row.native_tp is not None
    assert row.topology.native_reference().bitwise
    served = serve(row, checkpoints[MODEL], python, tmp_path / "afd")
    check_counts(row, served.reports)
    check_exact(natives[row.native_tp], served.alone)
    assert parity.compare(natives[row.native_tp], served.together).max_abs_dlogprob <= spread


@pytest.mark.full
def test_a_tensor_parallel_service_of_real_interpreters_leaves_nothing(
    checkpoints: dict[str, Path], natives: dict[int, Record], tmp_path: Path
) -> None:
    served = serve(R2A2F_TP, checkpoints[MODEL], Path(sys.executable), tmp_path / "afd")
    check_counts(R2A2F_TP, served.reports)
    check_exact(natives[2], served.alone)


@pytest.mark.full
@pytest.mark.parametrize("row", [R2A2F_DP, R4A2F], ids=lambda row: row.name)
def test_ffn_groups_of_one_world_answer_each_lane_as_a_single_lane_with_the_same_shards(
    row: Row,
    checkpoints: dict[str, Path],
    python: Path,
    natives: dict[int, Record],
    spread: float,
    split_experts: Served,
    tmp_path: Path,
) -> None:
    served = serve(row, checkpoints[MODEL], python, tmp_path / "afd")
    check_counts(row, served.reports)
    check_exact(split_experts.alone, served.alone)
    for found in (served.alone, served.together):
        assert parity.compare(natives[1], found).max_abs_dlogprob <= spread


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", [Fault.FFN_RETURNS_ZEROS, Fault.EXPERT_SWAPPED], ids=lambda fault: fault.value
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_fails_the_planted_faults(
    row: Row,
    fault: Fault,
    checkpoints: dict[str, Path],
    python: Path,
    natives: dict[int, Record],
    spread: float,
    tmp_path: Path,
) -> None:
    model = checkpoints[MODEL]
    wrong = plant(fault, RECIPES[MODEL], model, tmp_path)
    with apart(row, model, wrong, python, tmp_path / "run") as service:
        answers = ask_alone(service.endpoint, row.topology)
    found = parity.compare(natives[row.native_tp or 1], answers)
    assert found.equal_token_lists < len(PROMPTS)
    assert found.max_abs_dlogprob > (spread if row.native_tp is None else 0)
