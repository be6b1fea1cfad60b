# SPDX-License-Identifier: Apache-2.0
"""Run alone in a network namespace of its own: a service whose network then loses every packet.

A link that is down sends no reset and closes nothing: only silence shows it. Prints, for each end, the error and
the seconds until it was seen.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace

from tests.unit.control.harness import FAST, failure_of, plan, serving


def main() -> None:
    """Bring the loopback link up, serve, take it down, wait for both ends to notice."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with serving(settings=replace(FAST, failure_timeout_s=3)) as service:
        service.lanes[0].do("announce", plan(1, 7))
        assert service.groups[0].do("next_event", 10) == plan(1, 7)
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        lost = time.monotonic()
        for name, party in (("attention", service.lanes[0]), ("ffn", service.groups[0])):
            error = failure_of(party, 10)
            print(f"{name} {time.monotonic() - lost:.1f} {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
