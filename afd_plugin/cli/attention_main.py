# SPDX-License-Identifier: Apache-2.0
"""The attention child: vLLM's own OpenAI server with an AFD worker behind it.

Run by the launcher as ``python -m afd_plugin.cli.attention_main AFD_JSON MODEL [vLLM's serve options]``.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
import threading
from argparse import Namespace

from afd_plugin import report
from afd_plugin.cli.child import EngineError, checked_config, run_child
from afd_plugin.config import AFDConfig
from afd_plugin.errors import PortInUse
from afd_plugin.supervisor.ports import join_address


def serve(args: Namespace, afd: AFDConfig) -> None:
    """Serve until asked to stop.

    Raises:
        PortInUse: the HTTP address is taken.
        EngineError: vLLM's engine ended while serving.
    """
    import uvloop
    from vllm.entrypoints.openai.api_server import setup_server

    checked_config(args, afd)
    try:
        listening, http_socket = setup_server(args, reuse_port=False)
    except OSError as error:
        raise PortInUse(
            f"The HTTP address {args.host}:{args.port} cannot be bound ({error.strerror}); "
            "choose another --port or end the process that holds it."
        ) from None
    if not args.uds:
        args.port = http_socket.getsockname()[1]
        listening = f"{'https' if args.ssl_certfile else 'http'}://{join_address(args.host or '127.0.0.1', args.port)}"
    try:
        with http_socket:
            uvloop.run(_serve_http(args, listening, http_socket))
    except RuntimeError as error:
        raise EngineError(f"vLLM's engine failed ({error}); the log above has the reason.") from error


async def _serve_http(args: Namespace, listening: str, http_socket: socket.socket) -> None:
    from vllm.entrypoints.openai.api_server import build_and_serve, build_async_engine_client

    report.phase("starting the engine")
    ended = threading.Event()
    async with build_async_engine_client(args) as engine:
        watcher = threading.Thread(target=_report_when_healthy, args=(args, listening, ended), daemon=True)
        watcher.start()
        try:
            ending = await build_and_serve(engine, listening, http_socket, args)
        finally:
            ended.set()
        ended_by_itself = engine.errored and not report.stop_requested()  # a stopped engine counts as errored
    await ending
    if ended_by_itself:
        raise EngineError("vLLM's engine ended although nobody asked for it; the log above has the reason.")


def _report_when_healthy(args: Namespace, listening: str, ended: threading.Event) -> None:
    """Tell the launcher as soon as the HTTP server answers, unless it ends before that."""
    while not ended.wait(0.1):
        if healthy(args):
            report.phase("serving", url=listening, port=args.port)
            return


def healthy(args: Namespace, timeout: float = 5.0) -> bool:
    """Whether ``GET /health`` of the server described by ``args`` answers 200 (for a Unix socket:
    connects).
    """
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host or "", args.host)  # noqa: S104
    connection: http.client.HTTPConnection
    try:
        if args.uds:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(timeout)
                probe.connect(args.uds)
            return True
        if args.ssl_certfile:
            # Our own server on this host, asked whether it answers: its name is not in question.
            context = ssl._create_unverified_context()  # noqa: S323
            connection = http.client.HTTPSConnection(host, args.port, timeout=timeout, context=context)
        else:
            connection = http.client.HTTPConnection(host, args.port, timeout=timeout)
        prefix = args.root_path or ""
        connection.request("GET", f"{prefix}/health")
        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException):
        return False
    return status == http.HTTPStatus.OK


if __name__ == "__main__":
    sys.exit(run_child(serve, sys.argv[1:]))
