# SPDX-License-Identifier: Apache-2.0
"""The children read vLLM's options with vLLM's own parser and refuse in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from afd_plugin.cli.child import StopRequest, checked_config, parse_vllm_arguments
from afd_plugin.config import AFDConfig, Role
from afd_plugin.errors import ConfigRefused, ModelRefused, UnsupportedFeature
from afd_plugin.topology import Topology

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]  # vLLM's import and checks take most of a minute

ATTENTION = AFDConfig(Role.ATTENTION)
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_what_afd_decides_is_filled_in_and_the_rest_is_vllms(moe_model: str) -> None:
    words = [moe_model, "--max_model_len", "128", "--served-model-name", "m", "--port", "1234"]
    args = parse_vllm_arguments(words, ATTENTION)
    assert (args.model, args.max_model_len, args.port) == (moe_model, 128, 1234)
    assert args.worker_cls.endswith("CPUAFDAttentionWorker")
    assert args.distributed_executor_backend == "mp"
    assert args.enforce_eager
    assert args.additional_config == {"afd": ATTENTION.to_additional_config()}


def test_sizes_follow_the_topology_of_the_role(moe_model: str) -> None:
    topology = Topology(attention_dp=2, attention_tp=2, ffn_dp=2, ffn_tp=1, expert_parallel=True)
    attention = parse_vllm_arguments([moe_model], AFDConfig(Role.ATTENTION, topology))
    assert (attention.data_parallel_size, attention.tensor_parallel_size) == (2, 2)
    assert not attention.enable_expert_parallel
    ffn = parse_vllm_arguments([moe_model], AFDConfig(Role.FFN, topology))
    assert (ffn.data_parallel_size, ffn.tensor_parallel_size) == (1, 1)  # joined by VLLM_DP_* instead
    assert ffn.enable_expert_parallel


def test_the_users_additional_config_is_kept_beside_afds(moe_model: str) -> None:
    args = parse_vllm_arguments([moe_model, "--additional-config", '{"mine": 1}'], ATTENTION)
    assert args.additional_config["mine"] == 1
    with pytest.raises(ConfigRefused, match="entry of its own"):
        parse_vllm_arguments([moe_model, "--additional-config", '{"afd": {"role": "ffn"}}'], ATTENTION)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--no-such-option"], "vLLM does not take these options: unrecognized arguments"),
        (["--max-model-len", "many"], "vLLM does not take these options"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is 2, but AFD sets it to 1"),
        (["--worker-cls", "x.Y"], "--worker-cls is 'x.Y'"),
        (["--enable-auto-tool-choice"], "requires --tool-call-parser"),
    ],
)
def test_arguments_vllm_or_afd_refuses_are_one_sentence(
    moe_model: str, words: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigRefused, match=sentence):
        parse_vllm_arguments([moe_model, *words], ATTENTION)


def test_what_vllm_itself_refuses_is_told_without_its_frame(moe_model: str) -> None:
    args = parse_vllm_arguments([moe_model, "--enable-sleep-mode"], ATTENTION)
    with pytest.raises(ConfigRefused) as refused:
        checked_config(args, ATTENTION)
    assert str(refused.value) == (
        "vLLM refuses this configuration: Sleep mode is not supported on current platform."
    )


def test_a_missing_model_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    args = parse_vllm_arguments([str(tmp_path_factory.mktemp("empty"))], ATTENTION)
    with pytest.raises(ConfigRefused, match="vLLM refuses this configuration"):
        checked_config(args, ATTENTION)


def test_the_finished_configuration_is_checked(moe_model: str, dense_model: str) -> None:
    words = ["--skip-tokenizer-init", "--speculative-config", '{"method":"ngram","num_speculative_tokens":2}']
    with pytest.raises(UnsupportedFeature, match="Speculative decoding"):
        checked_config(parse_vllm_arguments([moe_model, *words], ATTENTION), ATTENTION)
    with pytest.raises(ModelRefused, match="no MoE layer"):
        checked_config(parse_vllm_arguments([dense_model, words[0]], ATTENTION), ATTENTION)
    config = checked_config(parse_vllm_arguments([moe_model, words[0]], ATTENTION), ATTENTION)
    assert config.model_config.is_moe


def test_the_ffn_takes_the_attention_roles_batch_size(moe_model: str) -> None:
    from afd_plugin.cli.ffn_main import _match_batch_sizes

    topology = Topology(attention_tp=2)
    attention, ffn = AFDConfig(Role.ATTENTION, topology), AFDConfig(Role.FFN, topology)
    sizes = []
    for afd in (attention, ffn):
        args = parse_vllm_arguments([moe_model, "--skip-tokenizer-init"], afd)
        if afd is ffn:
            _match_batch_sizes(args, afd)
        sizes.append(checked_config(args, afd).scheduler_config.max_num_batched_tokens)
    assert sizes[0] == sizes[1]


def _wait_as_vllm_does(address: str, stop: StopRequest) -> None:
    import zmq
    from vllm.utils.network_utils import zmq_socket_ctx

    with stop.interrupting(), zmq_socket_ctx(address, zmq.ROUTER, bind=True) as waiting:
        os.kill(os.getpid(), signal.SIGTERM)
        waiting.poll(5_000)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves the socket to its context
def test_a_request_to_stop_gets_through_vllms_start_up_wait(tmp_path_factory: pytest.TempPathFactory) -> None:
    stop = StopRequest()
    with pytest.raises(SystemExit) as ended:
        _wait_as_vllm_does(f"ipc://{tmp_path_factory.mktemp('s')}/s", stop)
    assert ended.value.code == 0
    assert stop.seen


@pytest.mark.parametrize("role", list(Role))
def test_a_refused_child_ends_with_code_2_and_one_sentence(role: Role, dense_model: str) -> None:
    config = json.dumps(AFDConfig(role).to_additional_config())
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            f"afd_plugin.cli.{role.value}_main",
            config,
            dense_model,
            "--skip-tokenizer-init",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("afd: ")]
    assert len(sentences) == 1
    assert sentences[0].startswith(
        "afd: model-refused: Qwen3ForCausalLM has no MoE layer, so there is nothing"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("role", Role)
def test_a_traced_process_is_named_after_its_role_and_one_that_is_not_traced_is_left_alone(
    role: Role, moe_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    parse_vllm_arguments([moe_model], AFDConfig(role))
    assert "OTEL_RESOURCE_ATTRIBUTES" not in os.environ
    assert {name for name in os.environ.keys() - before.keys() if name.startswith("OTEL_")} == set()
    parse_vllm_arguments([moe_model, "--otlp-traces-endpoint", "http://127.0.0.1:9"], AFDConfig(role))
    named = os.environ.pop("OTEL_RESOURCE_ATTRIBUTES")
    assert named == f"service.instance.id={role.value}-0,afd.role={role.value},service.name=afd-{role.value}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9")
    parse_vllm_arguments([moe_model], AFDConfig(role))
    assert os.environ.pop("OTEL_RESOURCE_ATTRIBUTES") == named
