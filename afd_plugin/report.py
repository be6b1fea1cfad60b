# SPDX-License-Identifier: Apache-2.0
"""How a process below a launcher tells it where it stands and why it failed.

The launcher (:mod:`afd_plugin.supervisor`) sits several processes above the worker that knows the reason
of a failure, with vLLM's own processes between them, and none of those carries an exit code upwards. So
the launcher names a datagram socket in the environment (``AFD_REPORT``) and every process below it may
send one small JSON object there: a *phase* ("loading weights", "serving") or a *failure* (error name,
sentence, exit code). Without a launcher both calls do nothing. A report is best effort: it never blocks
and never raises for a launcher that is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from afd_plugin.errors import AFDError

REPORT_VARIABLE = "AFD_REPORT"
"""Environment variable with the path of the launcher's datagram socket."""

SOURCE_VARIABLE = "AFD_REPORT_SOURCE"
"""Environment variable with the name the launcher gave to this process's tree, for example ``ffn-0``."""

STOPPING_NAME = "stopping"
"""File beside the socket that exists once the launcher has asked its children to stop."""

LEAVING = "leaving"
"""The phase of an FFN that attention has let go: nobody waits for it, and its processes may take their time to end."""

MAX_REPORT_BYTES = 32_768
_MAX_TEXT = 8_000


def phase(name: str, **details: str | int | float) -> None:
    """Tell the launcher that this process reached the phase ``name``; ``details`` are plain values."""
    _send({"kind": "phase", "phase": name, "details": details})


def failure(error: BaseException) -> None:
    """Tell the launcher why this process is about to fail; the first report of a child's tree is its verdict.

    An exit on request (``SystemExit``, ``KeyboardInterrupt``) is no failure and is not reported.
    """
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return
    if isinstance(error, AFDError):
        name, code = error.name, error.exit_code
    else:
        name, code = type(error).__name__, 1
    text = str(error) or type(error).__name__
    _send({"kind": "failure", "error": name, "message": text[:_MAX_TEXT], "exit_code": code})


def stop_requested(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher has begun a clean stop; False without a launcher."""
    return _stop_began(env) is not None


def stopping_for(env: Mapping[str, str] = os.environ) -> float:
    """Seconds since the launcher began a clean stop; 0.0 while it has not, and without a launcher. Microseconds."""
    began = _stop_began(env)
    return 0.0 if began is None else max(0.0, time.time() - began)


def _stop_began(env: Mapping[str, str]) -> float | None:
    path = env.get(REPORT_VARIABLE)
    if path is None:
        return None
    try:
        return Path(path).with_name(STOPPING_NAME).stat().st_mtime
    except OSError:
        return None


def _send(content: dict[str, object], env: Mapping[str, str] = os.environ) -> None:
    path = env.get(REPORT_VARIABLE)
    if not path:
        return
    content["source"] = env.get(SOURCE_VARIABLE, "")
    content["pid"] = os.getpid()
    data = json.dumps(content).encode()[:MAX_REPORT_BYTES]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(data, path)
