# SPDX-License-Identifier: Apache-2.0
"""A program without a supervisor ends what it started when it is asked to end."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

PROGRAM = """
import subprocess, sys, time
from afd_plugin.supervisor.signals import leave_by_exit
leave_by_exit()
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
try:
    print(server.pid, flush=True)
    time.sleep(60)
finally:
    server.kill()
    server.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_is_asked_to_end_ends_its_servers_first(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        server = int(program.stdout.readline())
        program.send_signal(number)
        assert program.wait(timeout=20) == 128 + number
    assert not psutil.pid_exists(server)
