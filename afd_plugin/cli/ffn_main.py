# SPDX-License-Identifier: Apache-2.0
"""The FFN child: vLLM's multiprocessing executor and one RPC that serves. No engine core, scheduler or KV
cache.

Run by the launcher as ``python -m afd_plugin.cli.ffn_main AFD_JSON MODEL [vLLM's engine options]``, once
per FFN group.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from afd_plugin import report
from afd_plugin.cli.child import EngineError, checked_config, run_child
from afd_plugin.cli.companions import Companions
from afd_plugin.config import AFDConfig
from afd_plugin.errors import AFDError, ConfigRefused, PortInUse
from afd_plugin.observability.status import STATUS_VARIABLE, StatusServer

if TYPE_CHECKING:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor


def serve(args: Namespace, afd: AFDConfig) -> None:
    """Load the FFN's half and serve until attention shuts the service down or SIGTERM arrives.

    Raises:
        EngineError: a worker died or raised.
    """
    from vllm.tracing import init_tracer
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    if args.otlp_traces_endpoint:  # as vLLM's engine client does, of which the FFN has none
        init_tracer("afd.ffn", args.otlp_traces_endpoint)
    _match_batch_sizes(args, afd)
    config = checked_config(args, afd)
    executor_class = Executor.get_class(config)
    if not issubclass(executor_class, MultiprocExecutor):
        raise ConfigRefused(
            f"vLLM chose {executor_class.__name__}; the FFN needs --distributed-executor-backend mp."
        )
    with _status_endpoint() as status:
        _phase(status, "starting the workers")
        try:
            executor = executor_class(config)
        except AFDError:
            raise
        except Exception as error:  # vLLM's executor says by a plain one that a worker did not start
            raise EngineError(
                f"The FFN's workers did not start ({error}); the log above has the reason."
            ) from error
        _serve(executor, status)


@contextmanager
def _status_endpoint() -> Iterator[StatusServer | None]:
    """The endpoint that the launcher asked for, until the FFN ends; None without a launcher."""
    address = os.environ.get(STATUS_VARIABLE)
    if not address:
        yield None
        return
    host, _, port = address.rpartition(":")
    try:
        server = StatusServer(host.strip("[]"), int(port))
    except OSError as error:
        raise PortInUse(
            f"The status endpoint cannot be bound to {address} ({error.strerror}); choose another --status."
        ) from None
    try:
        yield server
    finally:
        server.close()


def _phase(status: StatusServer | None, name: str) -> None:
    """Tell the launcher and whoever asks the status endpoint."""
    if status is None:
        report.phase(name)
        return
    status.phase = name
    status.serving = name == "serving"
    report.phase(name, status=f"http://{status.address}")


def _serve(executor: MultiprocExecutor, status: StatusServer | None) -> None:
    asked = False
    companions = Companions([worker.proc for worker in executor.workers])

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        companions.let_end()
        for worker in executor.workers:  # they leave their wait, tell attention, and close both planes
            worker.proc.terminate()

    signal.signal(signal.SIGTERM, stop)
    try:
        future = executor.collective_rpc("afd_serve", non_block=True)
        _phase(status, "serving")
        future.result()
        _phase(status, report.LEAVING)
    except RuntimeError as error:
        if status is not None:
            status.failed = not asked
        if asked:
            return
        dead = [
            f"{one.proc.name} with exit code {one.proc.exitcode}"
            for one in executor.workers
            if one.proc.exitcode
        ]
        if dead:
            raise EngineError(f"A worker of the FFN died: {', '.join(dead)}.") from error
        raise EngineError(f"The FFN stopped serving ({error}); the log above has the reason.") from error
    finally:
        # It ends by itself now. A SIGTERM that comes late, because another FFN process ended first, must not reach a
        # handler that touches workers which are gone: raised while Python ends, it makes the exit code 120.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        companions.close()
        executor.shutdown()


def _match_batch_sizes(args: Namespace, afd: AFDConfig) -> None:
    """Give the FFN the attention role's default batch size, which vLLM derives from that role's parallel
    sizes.
    """
    if args.max_num_batched_tokens is not None or afd.topology.attention_tp == args.tensor_parallel_size:
        return
    as_attention = Namespace(**{**vars(args), "tensor_parallel_size": afd.topology.attention_tp})
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine_args: AsyncEngineArgs = AsyncEngineArgs.from_cli_args(as_attention)
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    args.max_num_batched_tokens = config.scheduler_config.max_num_batched_tokens


if __name__ == "__main__":
    sys.exit(run_child(serve, sys.argv[1:]))
