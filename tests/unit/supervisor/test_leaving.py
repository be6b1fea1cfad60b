# SPDX-License-Identifier: Apache-2.0
"""What becomes of a service of which one child has left in good order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.supervisor.harness import Run, child


@pytest.mark.parametrize("ready", [True, False], ids=["serving", "starting"])
def test_a_child_that_leaves_in_good_order_is_no_clean_end_where_another_then_fails(
    ready: bool, tmp_path: Path
) -> None:
    """Attention lets the FFN go, and learns of its dead engine a second later; asked to stop, it would say nothing."""
    serving = "report.phase('serving')" if ready else ""
    peer = child("attention-0", f"{serving}\nsys.exit(0 if stop.wait(1.5) else 1)")
    left = child("ffn-0", f"{serving}\ntime.sleep(0.3)", order=1)
    run = Run(tmp_path, left, peer)
    assert run.outcome.exit_code == 1
    assert run.outcome.cause is not None
    assert run.outcome.cause.message.startswith("attention-0 exited with code 1.")
