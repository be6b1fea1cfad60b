# SPDX-License-Identifier: Apache-2.0
"""The verdict of a supervised run is a pure function of what was observed."""

from __future__ import annotations

import pytest

from afd_plugin.supervisor.spec import Fault, choose_cause, describe_exit

DIED = Fault("ffn-0", "child-died", "ffn-0 was ended by SIGKILL.", 1)
LOST = Fault("attention-0", "peer-lost", "FFN group 0 closed its connection.", 3)
REFUSED = Fault("attention-0", "config-refused", "Unknown key.", 2)
LATE = Fault("ffn-0", "rendezvous-timeout", "Lane 0 is missing.", 4)
OWN = Fault("ffn-0", "RuntimeError", "layer 3 failed", 1)
ABOVE = Fault("ffn-0", "RuntimeError", "Engine core initialization failed.", 1)

ENGINE = Fault("attention-0", "engine-failed", "vLLM's engine ended although nobody asked for it.", 1)
LANE_LOST = Fault("ffn-0", "peer-lost", "attention lane 0 (pid 7) is gone.", 3)
QUOTED = Fault("attention-0", "engine-failed", f"{ENGINE.message} ffn-0 saw: {LANE_LOST.message}", 1)
DIED_TOO = Fault("attention-0", "child-died", "attention-0 exited with code 1.", 1)


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ((), None),
        ((DIED,), DIED),
        ((LOST, DIED), DIED),
        ((DIED, LOST), DIED),
        ((LATE, REFUSED), REFUSED),
        ((LOST, LATE), LATE),
        ((DIED, OWN), OWN),
        ((LOST, OWN, DIED), OWN),
        ((LATE, ABOVE, DIED), LATE),
        ((LOST, LATE, ABOVE), LATE),
        ((ENGINE, LOST), LOST),
        ((LOST, ENGINE), LOST),
        ((DIED_TOO, ENGINE), ENGINE),
        ((LANE_LOST, ENGINE, DIED_TOO), QUOTED),
        ((LANE_LOST, DIED_TOO), DIED_TOO),
        ((ENGINE, DIED_TOO), ENGINE),
    ],
)
def test_the_cause_is_the_fault_that_explains_the_others(
    faults: tuple[Fault, ...], expected: Fault | None
) -> None:
    assert choose_cause(faults) == expected


def test_an_exit_status_is_told_by_signal_name_or_code() -> None:
    assert describe_exit("ffn-0", -9) == "ffn-0 was ended by SIGKILL."
    assert describe_exit("ffn-0", 2) == "ffn-0 exited with code 2."
