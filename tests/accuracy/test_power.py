# SPDX-License-Identifier: Apache-2.0
"""Each planted fault is caught by the accuracy gate's own comparison, and a right FFN is not.

The sides and the verdict are those of the gate, on fewer rows. On a cell that is equal to the bit the gate requires
equal answers, and that is what must catch each fault here; so few rows need not show it in the scores, whose p-value
is printed. What changes too few answers (`Fault.in_answers`) is caught by the numeric probe alone
(`test_planted_probes.py`, which plants every fault).
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from afd_plugin.config import AFDConfig, LinkSettings, Role
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.service import Service
from afd_plugin.supervisor.ports import PortReservation
from afd_plugin.v1.refusals import WORKER_CLASSES
from qualify.accuracy import data, harness, scoring, sides
from qualify.accuracy.architectures import ARCHITECTURES, DEEPSEEK_V3, QWEN3_MOE
from qualify.accuracy.harness import Spec
from qualify.accuracy.scoring import Side, Unscorable
from qualify.accuracy.verdict import Comparison
from tests.accuracy.planted import VARIABLE, Fault, checkpoint
from tests.e2e.harness import environment
from tests.e2e.services import flags, running, vllm_serve

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ROWS = int(os.environ.get("AFD_ACCURACY_POWER_ROWS", "40"))
"""Of each task; the gate asks 200 to 400."""

CASES = [
    pytest.param(name, fault, id=f"{name.removeprefix('trained-')}-{fault.value}")
    for name, architecture in ARCHITECTURES.items()
    for fault in Fault
    if fault.possible(architecture) and fault.in_answers
]


@dataclass(frozen=True)
class Native:
    """Native's answers to the rows of one model."""

    model: Path
    requested: Mapping[str, int]
    questions: Path
    side: Side


def ask(service: Service, requested: Mapping[str, int], model: Path, folder: Path, questions: Path) -> Side:
    spec = Spec(
        sides.completions_url(service),
        "m",
        str(model),
        tuple(requested),
        sides.ENGINE.max_model_len,
        str(folder / "lm-eval.json"),
    )
    return scoring.read(harness.run(spec, questions, folder / "lm-eval", 600), requested)


@pytest.fixture(scope="module")
def native(
    python: Path, trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Native]:
    """Each model's native side, made when it is first asked for."""

    class Made(dict[str, Native]):
        def __missing__(self, name: str) -> Native:
            folder = tmp_path_factory.mktemp(name)
            questions = folder / "questions"
            questions.mkdir()
            model, requested = trained[name], data.write(questions, data.MIXES[name], ROWS)
            with running(vllm_serve(python), model, sides.ENGINE, folder / "service", native=True) as service:
                side = ask(service, requested, model, folder, questions)
            self[name] = Native(model, requested, questions, side)
            return self[name]

    return Made()


@contextmanager
def disaggregated(python: Path, fault: Fault, model: Path, wrong: Path, folder: Path) -> Iterator[Service]:
    """Attention with the right checkpoint, an FFN with the fault."""

    def planted(model: Path, name: str, port: int, engine: EngineArguments) -> list[str]:
        content = json.dumps(AFDConfig(Role.FFN).to_additional_config())
        return [str(python), "-m", "tests.accuracy.planted", content, str(model), *flags(engine)]

    with ExitStack() as stack:
        port = stack.enter_context(PortReservation())
        address = f"127.0.0.1:{port.port}"
        link = LinkSettings(listen=address, peer=address, token="t").to_env()
        ffn = Service(
            planted, wrong, "m", sides.ENGINE, folder / "ffn", environment({**link, VARIABLE: fault.value})
        )
        stack.enter_context(ffn)
        options = [
            "--worker-cls",
            WORKER_CLASSES[Role.ATTENTION, "cpu"],
            "--additional-config",
            json.dumps({"afd": AFDConfig(Role.ATTENTION).to_additional_config()}),
            "--shutdown-timeout",
            "30",
        ]
        attention = vllm_serve(python, options)
        yield stack.enter_context(running(attention, model, sides.ENGINE, folder / "attention", **link))


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_the_gate_catches_each_planted_fault_and_passes_a_right_ffn(
    name: str, fault: Fault, python: Path, native: dict[str, Native], tmp_path: Path
) -> None:
    right = native[name]
    wrong = checkpoint(fault, ARCHITECTURES[name], right.model, tmp_path / "wrong" / right.model.name)
    with disaggregated(python, fault, right.model, wrong, tmp_path) as service:
        try:
            side = ask(service, right.requested, right.model, tmp_path, right.questions)
        except Unscorable as error:
            print(f"POWER {name} {fault.value}: refused before scoring: {error}")
            assert fault is not Fault.NONE
            return
    found = Comparison.of(right.side, side, bitwise=True)
    pooled = found.pooled
    print(
        f"POWER {name} {fault.value}: native {pooled.native:.3f}, AFD {pooled.afd:.3f}, lost {pooled.lost}, "
        f"won {pooled.won}, p = {pooled.p_value:.2g}, {sum(found.differing.values())} of {pooled.rows} differ"
    )
    if fault is Fault.NONE:
        assert found.pooled.lost == found.pooled.won == sum(found.differing.values()) == 0
        return
    assert any("equal to the bit" in reason for reason in found.faults())


def test_every_fault_is_planted_in_at_least_one_model() -> None:
    assert all(fault.possible(DEEPSEEK_V3) for fault in Fault)
    assert {fault for fault in Fault if not fault.possible(QWEN3_MOE)} == {
        Fault.SHARED_SCALED,
        Fault.ROUTER_BIAS_IGNORED,
        Fault.SCALED_TWICE,
    }
