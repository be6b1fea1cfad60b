# SPDX-License-Identifier: Apache-2.0
"""Every AFD cell against the native engine of the same model and mode, by token ids and logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qualify.gpu.engines import TWO_GPUS, native, role_report, service, wait_all
from qualify.gpu.host import MODES, PARITY_ENGINE, RUN_S, START_S, Host
from qualify.gpu.workloads import LOGPROBS, PARITY_TOKENS, compare, parity_prompts

Reference = tuple[str, str, int]
"""Model, mode and tensor-parallel size of a native engine."""


@dataclass(frozen=True)
class ParityCase:
    """One AFD cell to compare with the native engine of the same model and mode."""

    model: str
    mode: str
    gate: str = "ffn"
    dense: str = "attention"
    shared: str = "ffn"
    microbatches: int = 1
    connector: str = "CudaIpcAFDConnector"
    two_gpus: bool = False
    shards: int = 1
    """FFN processes among which the experts are split."""

    lanes: int = 1
    """Attention engines of their own that share the FFN; each is asked everything."""

    attention_tp: int = 1
    """Above 1 on two GPUs, with the FFN on the first of them; the reference has the same TP."""

    @property
    def reference(self) -> Reference:
        """The native engine that it is compared with."""
        return self.model, self.mode, self.attention_tp

    def rival(self, gpus: int) -> Reference | None:
        """A native engine that differs from the reference as this cell does: whole experts against sliced ones.

        None where the cell computes what its reference does, and where ``gpus`` do not hold a native engine with TP2.
        """
        if gpus < 2 or (self.shards == 1 and self.attention_tp == 1):
            return None
        return self.model, self.mode, 1 if self.attention_tp > 1 else 2

    @property
    def visible(self) -> tuple[str, str] | None:
        """The GPUs of attention and of the FFN; None shares what there is."""
        if self.attention_tp > 1:
            return "0,1", "0"
        return TWO_GPUS if self.two_gpus else None

    @property
    def name(self) -> str:
        name = f"{self.model}-{self.mode}-gate-{self.gate}"
        name += "" if self.dense == "attention" else "-dense-ffn"
        name += "" if self.shared == "ffn" else "-shared-attention"
        name += f"-shards{self.shards}" if self.shards > 1 else ""
        name += f"-engines{self.lanes}" if self.lanes > 1 else ""
        name += f"-attention-tp{self.attention_tp}" if self.attention_tp > 1 else ""
        if self.two_gpus and self.attention_tp == 1:
            name += "-nccl" if self.connector == "P2pNcclAFDConnector" else "-nvlink"
        return name if self.microbatches == 1 else f"{name}-dbo"


_LINKED: tuple[ParityCase, ...] = tuple(
    ParityCase(model, mode, gate, microbatches=stages, connector=connector, two_gpus=True)
    for connector in ("P2pNcclAFDConnector", "CudaIpcAFDConnector")
    for model, gate in (("deepseek-v2", "ffn"), ("qwen3-moe", "attention"))
    for mode in ("eager", "graph")
    for stages in (1, 2)
)
EQUAL_SHARE, EQUAL_SHARE_SHARDED = 0.9, 0.5
"""How many tokens must be equal to native's, of those that are equal between two native runs whose kernels see other
sizes, or between native TP1 and TP2; and where experts are sharded on a host that holds only the first reference.
"""


NVLINK_CASES = (
    *_LINKED,
    ParityCase("qwen3-moe", "graph", two_gpus=True, attention_tp=2),
    ParityCase("deepseek-v2", "graph", "attention", shards=2),
    ParityCase("deepseek-v3", "graph", shards=2),
)
"""Two GPUs: both connectors, MLA and Qwen3-MoE, both modes, without and with microbatches; attention with TP2 and the
FFN sharing one of its GPUs; experts split over two processes, with native's own difference between TP1 and TP2 beside.
"""

REPAIRED_CASES: tuple[ParityCase, ...] = tuple(
    ParityCase(model, mode, gate, microbatches=2)
    for model, gate in (("deepseek-v2", "ffn"), ("qwen3-moe", "attention"))
    for mode in ("eager", "graph")
)
"""Microbatches on one GPU: what failed, or was out of tolerance, when it ran last."""

APART_CASES: tuple[ParityCase, ...] = tuple(
    ParityCase(model, mode, gate, shards=shards, lanes=lanes)
    for shards, lanes in ((1, 2), (2, 1))
    for model, mode, gate in (
        ("deepseek-v2", "eager", "ffn"),
        ("deepseek-v2", "graph", "attention"),
        ("deepseek-v3", "graph", "ffn"),
        ("qwen3-moe", "graph", "attention"),
    )
)
"""2A1F as two engines of their own, and 1A2F with the experts split over two processes."""

DEFAULT_CASES: tuple[ParityCase, ...] = tuple(
    ParityCase(model, mode, gate)
    for model in ("deepseek-v2", "deepseek-v3", "qwen3-moe")
    for mode in ("eager", "graph")
    for gate in ("ffn", "attention")
)

SHARED_CASES: tuple[ParityCase, ...] = tuple(
    ParityCase(model, mode, shared="attention")
    for model, mode in (("deepseek-v2", "graph"), ("deepseek-v3", "eager"))
)
"""Shared experts beside the exchange: what they give is added to the FFN's answer as natively."""


def parity(host: Host) -> dict[str, Any]:
    """Every case against native, twice; 64 prompts, lengths around 64 tokens so that decode batches shrink."""
    from afd_plugin.demo.checkpoints import make

    cases = chosen(host.setting("cases", []))
    models = {case.model: make(case.model) for case in cases}
    wanted = {case.reference for case in cases} | {case.rival(host.gpus) for case in cases}
    references = sorted(key for key in wanted if key is not None)
    workers = host.setting("workers", 4)
    with ThreadPoolExecutor(workers) as pool:
        # in this order, so that no case waits for a reference that has no thread
        futures = {key: pool.submit(_native_rows, host, models[key[0]], *key) for key in references}
        outcomes = list(pool.map(lambda case: _outcome(host, models[case.model], case, futures), cases))
    # a case whose reference failed says so itself
    native_runs = {key: future.result() for key, future in futures.items() if future.exception() is None}
    return {
        "prompts": len(parity_prompts()),
        "native_against_itself": {
            _label(key): asdict(compare(*runs[:2])) for key, runs in native_runs.items()
        },
        "native_in_other_batches": {
            _label(key): asdict(compare(runs[0], runs[2])) for key, runs in native_runs.items()
        },
        "cases": outcomes,
        "passed": all(map(as_promised, outcomes)),
    }


def chosen(setting: str | Sequence[Mapping[str, Any]]) -> list[ParityCase]:
    """The cases that a setting means: the name of a list, or fields of each case; empty means the default list."""
    if isinstance(setting, str):
        return list(
            {
                "default": DEFAULT_CASES,
                "repaired": REPAIRED_CASES,
                "nvlink": NVLINK_CASES,
                "nccl": [case for case in _LINKED if case.connector == "P2pNcclAFDConnector"],
                "apart": APART_CASES,
                "shared": SHARED_CASES,
                "doubtful": (*REPAIRED_CASES, *APART_CASES),
            }[setting]
        )
    return [ParityCase(**raw) for raw in setting] or list(DEFAULT_CASES)


def as_promised(outcome: Mapping[str, Any]) -> bool:
    """Exact, but where kernels see other sizes than native's (a split batch): there within what sizes change natively
    at first positions. Where partial outputs are added in another order (shards), or native would have sliced the
    experts, too (attention's TP), a first position may differ as far as native TP1 and TP2 do there; where these do not
    fit, as far as native differs from itself anywhere in this run: one router that chooses otherwise changes the rest.
    Where answers may differ at all, as many tokens as `tokens_wanted` are equal, so that no later step goes unjudged.
    Every process has ended with 0, and the devices of both roles have counted steps of the case's mode and stages.
    """
    if "error" in outcome or any(code != 0 for run in outcome["exit_codes"] for code in run.values()):
        return False
    split = outcome["case"].endswith("-dbo")
    kind, last_stage = "replayed" if "-graph-" in outcome["case"] else "eager", int(split)
    counts = [outcome[role]["device_steps"][kind] for role in ("attention", "ffn")]
    if not all(count[last_stage:] and count[last_stage] for count in counts):
        return False
    sharded = "-shards" in outcome["case"] or "-attention-tp" in outcome["case"]
    if not (split or sharded):
        return bool(outcome["exact"])
    largest = max(agreement["largest_first_difference"] for agreement in outcome["agreements"])
    fewest = min(agreement["equal_tokens"] for agreement in outcome["agreements"])
    return bool(largest <= outcome["tolerance"] and fewest >= outcome["tokens_wanted"])


def requests() -> dict[str, Any]:
    """The prompts, the number of tokens of each answer, and how many logprobs come with each token."""
    prompts = parity_prompts()
    lengths = [PARITY_TOKENS + (index % 8) for index in range(len(prompts))]
    return {"prompts": prompts, "lengths": lengths, "logprobs": LOGPROBS}


def _label(key: Reference) -> str:
    return f"{key[0]}-{key[1]}" if key[2] == 1 else f"{key[0]}-{key[1]}-tp{key[2]}"


def _native_rows(host: Host, model: Path, name: str, mode: str, ranks: int) -> list[Any]:
    arguments = {**PARITY_ENGINE, **MODES[mode], "tensor_parallel_size": ranks}
    with native(f"native-{_label((name, mode, ranks))}", model, arguments, host.logs) as engine:
        engine.receive(max(1.0, min(START_S, host.left())))
        runs = [engine.ask(min(RUN_S, host.left()), "generate", **requests()) for _ in range(2)]
        # the same prompts in other company: what batch sizes alone change, natively
        everything = requests()
        other: list[Any] = []
        for first in (0, 32):
            part = {key: everything[key][first : first + 32] for key in ("prompts", "lengths")}
            other += engine.ask(min(RUN_S, host.left()), "generate", **part, logprobs=LOGPROBS)
        return [*runs, other]


def _outcome(
    host: Host, model: Path, case: ParityCase, references: Mapping[Reference, Future[list[Any]]]
) -> dict[str, Any]:
    """What came of a case; an error, its reference's too, is the case's own outcome and no other's."""
    if host.left() < 45:
        return {"case": case.name, "error": "no time left", "exact": False}
    try:
        return _case(host, model, case, references)
    except Exception as error:  # noqa: BLE001 - written down
        return {"case": case.name, "error": f"{type(error).__name__}: {error}"[-5000:], "exact": False}


def _case(
    host: Host, model: Path, case: ParityCase, references: Mapping[Reference, Future[list[Any]]]
) -> dict[str, Any]:
    outcome: dict[str, Any] = {"case": case.name}
    engines = service(
        case.name, model, {**PARITY_ENGINE, **MODES[case.mode]}, host.logs,
        gate=case.gate, dense=case.dense, shared=case.shared, connector=case.connector,
        microbatches=case.microbatches, visible=case.visible, shards=case.shards, lanes=case.lanes,
        attention_tp=case.attention_tp,
    )  # fmt: skip
    runs: list[Any] = []
    try:
        ready = wait_all(engines, max(1.0, min(START_S, host.left())))
        outcome["ready_s"] = max(ready.values())
        for _ in range(2):
            for engine in engines:
                engine.tell("generate", **requests())
            runs.append([engine.receive(min(RUN_S, host.left())) for engine in engines])
        status = engines[0].ask(30, "rpc", method="afd_status")[0]
    except BaseException:
        for engine in engines:
            engine.close(graceful=False)
        raise
    outcome["exit_codes"] = [engine.close() for engine in engines[::-1]]
    reference = references[case.reference].result()
    others = compare(reference[0], reference[2])
    tolerance, wanted = others.largest_first_difference, EQUAL_SHARE * others.equal_tokens
    if (rival := case.rival(host.gpus)) is not None:  # the same kind of difference, at the same positions
        apart = compare(references[rival].result()[0], reference[0])
        outcome["natives_apart"] = asdict(apart)
        tolerance, wanted = apart.largest_first_difference, EQUAL_SHARE * apart.equal_tokens
    elif case.shards > 1:
        tolerance, wanted = others.largest_difference, EQUAL_SHARE_SHARDED * others.equal_tokens
    agreements = [
        compare(mine, theirs) for run, theirs in zip(runs, reference[:2], strict=True) for mine in run
    ]
    status.pop("tensor_names", None)
    outcome.update(
        agreements=[asdict(agreement) for agreement in agreements],
        exact=all(agreement.exact for agreement in agreements),
        tolerance=tolerance,
        tokens_wanted=int(wanted),
        attention={
            key: status[key] for key in ("steps", "graph_steps", "exchanges", "device_steps") if key in status
        },
        ffn={
            key: value
            for key, value in role_report(host.logs, case.name, "ffn").items()
            if key in ("steps", "eager", "captures", "replays", "uncaptured", "device_steps", "exchanges")
        },
    )
    return outcome
