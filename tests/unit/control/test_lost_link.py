# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMESPACE = ["unshare", "--map-root-user", "--net"]


def why_not() -> str:
    """Why this machine has no network namespaces for us; empty if it has."""
    try:
        done = subprocess.run(
            [*NAMESPACE, "ip", "link", "set", "lo", "up"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return done.stderr.strip() if done.returncode else ""


def test_a_link_that_drops_everything_is_found_by_both_ends_within_the_bound() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"no network namespaces here: {reason}")
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.unit.control.lost_link"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in lines] == ["attention", "ffn"]
    for _, seconds, error in lines:
        assert 1 <= float(seconds) <= 5
        assert "PeerLost" in error
        assert "silent" in error


def test_the_only_reason_to_skip_is_a_machine_that_refuses_namespaces() -> None:
    reason = why_not()
    assert not reason or any(word in reason for word in ("not installed", "not permitted", "unshare")), reason
