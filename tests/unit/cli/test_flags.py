# SPDX-License-Identifier: Apache-2.0
"""vLLM's own options pass through, except those AFD cannot honour or sets itself."""

from __future__ import annotations

import pytest

from afd_plugin.cli.flags import _NEUTRAL, _SWITCHES, given, options_of, refuse_arguments
from afd_plugin.errors import ConfigRefused
from afd_plugin.v1.refusals import RULES, FeatureRefused


def test_options_are_read_as_vllm_reads_them() -> None:
    words = ["--max_model_len", "128", "--seed=-1", "-tp", "2", "--hf-overrides.a.b", "c", "--enforce-eager"]
    assert list(options_of(words)) == [
        ("--max-model-len", "128"),
        ("--seed", "-1"),
        ("--tensor-parallel-size", "2"),
        ("--hf-overrides", "c"),
        ("--enforce-eager", ""),
    ]
    assert given(words, "--max-model-len")
    assert not given(words, "--seed-oss")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--max-model-len", "128", "--dtype", "bfloat16", "--served-model-name", "m"],
        ["--pipeline-parallel-size", "1", "-pcp=1", "--distributed-executor-backend", "mp"],
        ["--moe-backend", "triton", "--runner", "generate", "--cpu-offload-gb", "0"],
        ["--no-enable-lora", "--no-enable-prefix-caching"],
        ["--additional-config", '{"x": 1}'],
    ],
)
def test_what_afd_can_honour_passes(words: list[str]) -> None:
    refuse_arguments(words)


@pytest.mark.parametrize(
    ("words", "feature"),
    [
        (["-pp", "2"], "pipeline-parallel"),
        (["--pipeline_parallel_size=2"], "pipeline-parallel"),
        (["--prefill-context-parallel-size", "2"], "prefill-context-parallel"),
        (["-dcp", "2"], "decode-context-parallel"),
        (["--nnodes", "2"], "multi-node-role"),
        (["--data-parallel-external-lb"], "data-parallel-load-balancing"),
        (["--api-server-count", "4"], "data-parallel-load-balancing"),
        (["--headless"], "data-parallel-load-balancing"),
        (["--enable-eplb"], "eplb"),
        (["--enable_elastic_ep"], "elastic-expert-parallel"),
        (["--enable-fault-tolerance"], "fault-tolerance"),
        (["--enable-dbo"], "native-microbatching"),
        (["--ubatch-size", "2"], "native-microbatching"),
        (["--enable-lora"], "lora"),
        (["--lora-modules", "a=b"], "lora"),
        (["--speculative-config.method", "ngram"], "speculative-decoding"),
        (["-sc", "{}"], "speculative-decoding"),
        (["-q", "fp8"], "quantised-checkpoint"),
        (["--enable-return-routed-experts"], "returned-routed-experts"),
        (["--moe-backend", "deep-gemm-mega-moe"], "mega-moe"),
        (["--enable-sleep-mode"], "sleep-mode"),
        (["--cpu-offload-gb", "4"], "weight-offloading"),
        (["--offload-group-size", "2"], "weight-offloading"),
        (["--kv-offloading-size", "1"], "kv-offloading"),
        (["--kv-transfer-config", "{}"], "kv-transfer"),
        (["--kv-sharing-fast-prefill"], "kv-sharing-fast-prefill"),
        (["--weight-transfer-config", "{}"], "weight-transfer"),
        (["--distributed-executor-backend", "ray"], "ray"),
        (["--distributed-executor-backend", "uni"], "executor"),
        (["-dpb", "ray"], "ray"),
        (["--runner", "pooling"], "pooling"),
    ],
)
def test_what_afd_cannot_honour_is_refused_by_name(words: list[str], feature: str) -> None:
    with pytest.raises(FeatureRefused) as refused:
        refuse_arguments(["--dtype", "bfloat16", *words])
    assert refused.value.feature == feature
    assert str(refused.value).startswith("--")


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["-tp", "2"], "--attention-tp"),
        (["--data-parallel-size", "2"], "--attention-dp"),
        (["--enable-expert-parallel"], "--ffn-ep"),
        (["--worker-cls", "x.Y"], "AFD chooses it"),
        (["--model", "m"], "MODEL"),
    ],
)
def test_what_afd_sets_is_refused_with_the_option_to_use(words: list[str], instead: str) -> None:
    with pytest.raises(ConfigRefused, match=instead):
        refuse_arguments(words)


def test_the_table_names_only_features_that_have_a_rule() -> None:
    features = {feature for feature, _ in _NEUTRAL.values()} | set(_SWITCHES.values())
    assert features <= {rule.feature for rule in RULES}


@pytest.mark.vllm
def test_every_option_in_the_tables_exists_in_vllm() -> None:
    from vllm.entrypoints.openai.cli_args import create_parser_for_docs

    from afd_plugin.cli.flags import _SHORT, OWNED

    known = create_parser_for_docs()._option_string_actions
    assert {*_NEUTRAL, *_SWITCHES, *OWNED, *_SHORT} <= known.keys()
    for short, long in _SHORT.items():
        assert known[short] is known[long]
