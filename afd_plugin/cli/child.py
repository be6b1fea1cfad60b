# SPDX-License-Identifier: Apache-2.0
"""What the children of both roles share: reading their arguments with vLLM's own parser, and failing in
one sentence.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from afd_plugin import report
from afd_plugin.cli.launch import DEBUG_VARIABLE
from afd_plugin.config import CONFIG_KEY, AFDConfig, Role
from afd_plugin.errors import AFDError, ConfigRefused
from afd_plugin.observability.tracing import ENDPOINT_VARIABLE, identify
from afd_plugin.v1.refusals import WORKER_CLASSES, check_environment, check_vllm_config, check_vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class EngineError(AFDError):
    """vLLM's engine or one of its workers died; the log above the error has the reason."""

    name = "engine-failed"
    mend = "Look at the log above: vLLM says there why its engine or a worker died."


def run_child(serve: Callable[[Namespace, AFDConfig], None], argv: Sequence[str]) -> int:
    """Parse ``argv`` (AFD's configuration, the model, vLLM's options) and serve; returns the exit code.

    A failure is reported to the launcher and written as one sentence; its traceback only with
    ``AFD_DEBUG``, except for an error nobody foresaw. A request to stop before the service was ready is a
    clean end, whatever it breaks on its way.
    """
    stop = StopRequest()
    try:
        report.phase("importing vLLM")
        with stop.interrupting():
            afd = AFDConfig.parse(json.loads(argv[0]))
            check_environment(os.environ)
            serve(parse_vllm_arguments(argv[1:], afd), afd)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except AFDError as error:
        if stop.seen:
            return 0
        report.failure(error)
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        sys.stderr.write(f"afd: {error.line()}\n")
        return error.exit_code
    except Exception as error:  # noqa: BLE001  (the outermost frame: reported, shown and turned into an exit code)
        if stop.seen:
            return 0
        report.failure(error)
        traceback.print_exc()
        return 1
    return 0


class StopRequest:
    """SIGTERM as an exception, until something with a better answer takes the signal over."""

    def __init__(self) -> None:
        self.seen = False

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """SIGTERM raises ``SystemExit(0)`` in the main thread.

        Not ``KeyboardInterrupt``: vLLM's ``zmq_socket_ctx`` swallows that one, and with it the request to
        stop that arrives while its engine cores start.
        """

        def interrupt(number: int, frame: FrameType | None) -> NoReturn:
            self.seen = True
            raise SystemExit(0)

        before = signal.signal(signal.SIGTERM, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def parse_vllm_arguments(argv: Sequence[str], afd: AFDConfig) -> Namespace:
    """vLLM's own serve arguments for this role, with what AFD decides filled in.

    Raises:
        ConfigRefused: vLLM's parser does not take the arguments, or they contradict AFD's configuration.
    """
    import vllm
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    check_vllm_version(vllm.__version__)
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog=f"afd {afd.role.value}"))
    parser.error = _refuse  # type: ignore[method-assign]
    args: Namespace = parser.parse_args(list(argv))
    args.model = args.model_tag
    _set(args, "distributed_executor_backend", "mp", None)
    _set(args, "worker_cls", WORKER_CLASSES[afd.role, current_platform.device_type], "auto")
    _set_sizes(args, afd, current_platform.device_type)
    args.enforce_eager = args.enforce_eager or current_platform.is_cpu()
    args.api_server_count = None
    additional = dict(args.additional_config or {})
    if additional.setdefault(CONFIG_KEY, afd.to_additional_config()) != afd.to_additional_config():
        raise ConfigRefused(
            f"--additional-config has an '{CONFIG_KEY}' entry of its own; use afd's options instead."
        )
    args.additional_config = additional
    with refused_by_vllm():
        validate_parsed_serve_args(args)
    if args.otlp_traces_endpoint or os.environ.get(ENDPOINT_VARIABLE):
        identify(os.environ, afd.role.value, os.environ.get("VLLM_DP_RANK", str(afd.member)))
    return args


def _refuse(message: str) -> NoReturn:
    raise ConfigRefused(f"vLLM does not take these options: {message}.")


def _set(args: Namespace, name: str, value: object, default: object) -> None:
    """Fill in what AFD decides; refuse another value that the user gave (in a config file, say)."""
    given = vars(args)[name]
    if given not in (default, value):
        option = "--" + name.replace("_", "-")
        raise ConfigRefused(f"{option} is {given!r}, but AFD sets it to {value!r}; drop the option.")
    setattr(args, name, value)


def _set_sizes(args: Namespace, afd: AFDConfig, device: str) -> None:
    topology = afd.topology
    if afd.role is Role.ATTENTION:
        _set(args, "tensor_parallel_size", topology.attention_tp, 1)
        _set(args, "data_parallel_size", topology.attention_world[0], 1)
        return
    _set(args, "tensor_parallel_size", topology.ffn_world(device)[1], 1)
    # Data-parallel ranks of the FFN are children of their own, joined by VLLM_DP_* in their environment (offline DP).
    _set(args, "data_parallel_size", 1, 1)
    args.enable_expert_parallel = args.enable_expert_parallel or topology.expert_parallel


def checked_config(args: Namespace, afd: AFDConfig) -> VllmConfig:
    """The configuration vLLM makes of ``args``, after every refusal had its chance."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    with refused_by_vllm():
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config: VllmConfig = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    check_vllm_config(config, afd)
    return config


@contextmanager
def refused_by_vllm() -> Iterator[None]:
    """Turn what vLLM raises for a configuration it refuses into one sentence."""
    try:
        yield
    except (ValueError, TypeError, OSError, NotImplementedError, AssertionError, ImportError) as error:
        raise ConfigRefused(f"vLLM refuses this configuration: {first_sentence(error)}") from error


def first_sentence(error: BaseException) -> str:
    """The telling line of ``error``, without the frame that pydantic puts around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line.removeprefix("Value error, ").split(" [type=")[0] for line in lines if " [type=" in line]
    text = (telling or lines or [type(error).__name__])[0]
    return text if text.endswith(".") else f"{text}."
