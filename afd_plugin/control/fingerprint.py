# SPDX-License-Identifier: Apache-2.0
"""What both roles must have been started with, compared before weights load (design section 4)."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from afd_plugin.plan import RemoteUnit

FINGERPRINT_VERSION = 1


class Fingerprint(Struct, frozen=True, kw_only=True):
    """The facts of one process that decide whether its results are those of the service.

    All fields but the last two must be equal in every member; :func:`diff` compares them.

    Attributes:
        version: Layout of this structure.
        plugin_version: Version of afd_plugin.
        vllm_version: ``vllm.__version__``.
        model_config_hash: Digest of the model's configuration, not of its path.
        dtype: Dtype of the hidden states that cross, for example ``torch.bfloat16``.
        hidden_size: Columns of the hidden states that cross.
        units: The modules that the FFN computes, in the order of their index.
        gate: Where router logits are computed.
        dense: Where the MLP of a layer without experts runs.
        shared_experts: Where shared experts run.
        connector: Class name of the data plane.
        runner: Generation of vLLM's model runner, ``v1``.
        graph_mode: vLLM's graph mode by name, ``NONE`` for eager.
        capture_sizes: Batch sizes of the captured graphs.
        microbatches: Stages per step.
        max_tokens: Upper bound of rows per attention lane and step.
        attention_dp, attention_tp, ffn_dp, ffn_tp, expert_parallel: The topology.
        extra: Anything else that must be equal, by name.
        model: The model as the user named it; for messages, not compared.
        devices: UUIDs of the GPUs of this member; not compared here.
    """

    plugin_version: str
    vllm_version: str
    model_config_hash: str
    dtype: str
    hidden_size: int
    units: tuple[RemoteUnit, ...]
    max_tokens: int
    gate: str = "ffn"
    dense: str = "attention"
    shared_experts: str = "ffn"
    connector: str = "TcpAFDConnector"
    runner: str = "v1"
    graph_mode: str = "NONE"
    capture_sizes: tuple[int, ...] = ()
    microbatches: int = 1
    attention_dp: int = 1
    attention_tp: int = 1
    ffn_dp: int = 1
    ffn_tp: int = 1
    expert_parallel: bool = False
    extra: dict[str, str] = {}
    version: int = FINGERPRINT_VERSION
    model: str = ""
    devices: tuple[str, ...] = ()


_NOT_COMPARED = frozenset({"model", "devices", "extra", "units", "capture_sizes"})
_MAX_SHOWN = 8


def diff(mine: Fingerprint, theirs: Fingerprint, my_name: str, their_name: str) -> tuple[str, ...]:
    """One line per field that differs, naming both sides' values; empty when both agree.

    Example line: ``dtype: FFN group 0 has torch.bfloat16, attention lane 1 has torch.float16``.
    """
    lines: list[str] = []

    def compare(field: str, left: object, right: object) -> None:
        if left != right:
            lines.append(f"{field}: {my_name} has {left}, {their_name} has {right}")

    for field in Fingerprint.__struct_fields__:
        if field not in _NOT_COMPARED:
            compare(field, getattr(mine, field), getattr(theirs, field))
    for key in sorted(mine.extra.keys() | theirs.extra.keys()):
        compare(key, mine.extra.get(key, "nothing"), theirs.extra.get(key, "nothing"))
    if mine.capture_sizes != theirs.capture_sizes:
        compare("capture_sizes", *_only(mine.capture_sizes, theirs.capture_sizes))
    if mine.units != theirs.units:
        left, right = _only(map(_unit, mine.units), map(_unit, theirs.units))
        compare("units", left, right)
    return tuple(lines)


def _unit(unit: RemoteUnit) -> str:
    logits = f", {unit.router_logits} router logits" if unit.router_logits else ""
    return f"{unit.index}={unit.name} ({unit.kind.value}{logits})"


def _only(left: Iterable[object], right: Iterable[object]) -> tuple[str, str]:
    """Both sequences as text, each without what it shares with the other."""
    left, right = list(left), list(right)
    if sorted(map(str, left)) == sorted(map(str, right)):
        return f"the order {_shown(left)}", f"the order {_shown(right)}"
    shared = set(left) & set(right)
    return tuple(  # type: ignore[return-value]
        f"{len(side)} ({_shown([item for item in side if item not in shared]) or 'none of its own'})"
        for side in (left, right)
    )


def _shown(items: list[object]) -> str:
    rest = len(items) - _MAX_SHOWN
    return ", ".join(map(str, items[:_MAX_SHOWN])) + (f" and {rest} more" if rest > 0 else "")
