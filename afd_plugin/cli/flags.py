# SPDX-License-Identifier: Apache-2.0
"""vLLM's own options as they pass through `afd`: which are refused, and which are AFD's to set.

Looked at before any process is started, so that a request AFD cannot honour is answered at once rather
than after vLLM's import. What gets past this table (a config file, an abbreviation) meets the same rules
again on the finished configuration (:mod:`afd_plugin.v1.refusals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from afd_plugin.errors import ConfigRefused
from afd_plugin.v1.refusals import RULES, FeatureRefused

OWNED: Mapping[str, str] = {
    "--tensor-parallel-size": "--attention-tp and --ffn-tp",
    "--data-parallel-size": "--attention-dp and --ffn-dp",
    "--enable-expert-parallel": "--ffn-ep",
    "--worker-cls": "nothing: AFD chooses it by role",
    "--model": "the MODEL argument",
}
"""Options of vLLM that AFD sets itself, and what to use instead."""

_NEUTRAL: Mapping[str, tuple[str, frozenset[str]]] = {
    "--pipeline-parallel-size": ("pipeline-parallel", frozenset({"1"})),
    "--prefill-context-parallel-size": ("prefill-context-parallel", frozenset({"1"})),
    "--decode-context-parallel-size": ("decode-context-parallel", frozenset({"1"})),
    "--nnodes": ("multi-node-role", frozenset({"1"})),
    "--node-rank": ("multi-node-role", frozenset({"0"})),
    "--data-parallel-rank": ("data-parallel-load-balancing", frozenset()),
    "--data-parallel-start-rank": ("data-parallel-load-balancing", frozenset()),
    "--data-parallel-size-local": ("data-parallel-load-balancing", frozenset()),
    "--api-server-count": ("data-parallel-load-balancing", frozenset({"1"})),
    "--ubatch-size": ("native-microbatching", frozenset({"0", "1"})),
    "--lora-modules": ("lora", frozenset()),
    "--speculative-config": ("speculative-decoding", frozenset()),
    "--spec-method": ("speculative-decoding", frozenset()),
    "--spec-model": ("speculative-decoding", frozenset()),
    "--quantization": ("quantised-checkpoint", frozenset()),
    "--cpu-offload-gb": ("weight-offloading", frozenset({"0", "0.0"})),
    "--offload-backend": ("weight-offloading", frozenset({"auto"})),
    "--offload-group-size": ("weight-offloading", frozenset({"0"})),
    "--kv-offloading-size": ("kv-offloading", frozenset()),
    "--kv-transfer-config": ("kv-transfer", frozenset()),
    "--ec-transfer-config": ("kv-transfer", frozenset()),
    "--weight-transfer-config": ("weight-transfer", frozenset()),
    "--data-parallel-backend": ("ray", frozenset({"mp"})),
    "--runner": ("pooling", frozenset({"auto", "generate"})),
}
"""Options with a value: the feature they ask for, unless the value is one of the neutral ones."""

_SWITCHES: Mapping[str, str] = {
    "--data-parallel-external-lb": "data-parallel-load-balancing",
    "--data-parallel-hybrid-lb": "data-parallel-load-balancing",
    "--data-parallel-multi-port-external-lb": "data-parallel-load-balancing",
    "--headless": "data-parallel-load-balancing",
    "--enable-eplb": "eplb",
    "--enable-elastic-ep": "elastic-expert-parallel",
    "--enable-fault-tolerance": "fault-tolerance",
    "--enable-dbo": "native-microbatching",
    "--enable-lora": "lora",
    "--enable-return-routed-experts": "returned-routed-experts",
    "--enable-sleep-mode": "sleep-mode",
    "--kv-sharing-fast-prefill": "kv-sharing-fast-prefill",
}

_SHORT: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-asc": "--api-server-count",
    "-q": "--quantization",
    "-sc": "--speculative-config",
}

_SENTENCES = {rule.feature: rule.sentence for rule in RULES}


def options_of(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option of ``arguments`` in its long form with dashes, and its value (empty for a switch).

    ``--a_b.c=v`` is reported as ``--a-b`` with the value ``v``, as vLLM's own parser reads it.
    """
    for position, word in enumerate(arguments):
        if not word.startswith("-") or word == "-" or word[1:2].isdigit():
            continue
        name, _, value = word.partition("=")
        name = name.split(".", 1)[0]
        if name.startswith("--"):
            name = "--" + name[2:].replace("_", "-")
        name = _SHORT.get(name, name)
        if not value and position + 1 < len(arguments) and not arguments[position + 1].startswith("--"):
            value = arguments[position + 1]
        yield name, value


def given(arguments: Sequence[str], name: str) -> bool:
    """Whether ``arguments`` contain the option ``name`` in any spelling."""
    return any(option == name for option, _ in options_of(arguments))


def refuse_arguments(arguments: Sequence[str]) -> None:
    """Raise a named refusal for the first of vLLM's options in ``arguments`` that AFD cannot honour.

    Raises:
        ConfigRefused: the option is AFD's to set.
        FeatureRefused: the option asks for a feature that AFD refuses.
    """
    for name, value in options_of(arguments):
        if name in OWNED:
            raise ConfigRefused(f"{name} is set by AFD; use {OWNED[name]}.")
        feature = _feature_of(name, value)
        if feature is not None:
            raise FeatureRefused(feature, f"{name}: {_SENTENCES[feature]}")


def _feature_of(name: str, value: str) -> str | None:
    if name in _SWITCHES:
        return _SWITCHES[name]
    if name in _NEUTRAL:
        feature, neutral = _NEUTRAL[name]
        return None if value in neutral else feature
    if name == "--distributed-executor-backend" and value != "mp":
        return "ray" if value == "ray" else "executor"
    if name == "--moe-backend" and value.lower().replace("-", "_") == "deep_gemm_mega_moe":
        return "mega-moe"
    return None
