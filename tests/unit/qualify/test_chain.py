# SPDX-License-Identifier: Apache-2.0
"""What a session's log shows: whose failure it was, by the lines that nox and pytest really write."""

from __future__ import annotations

import pytest

from qualify import chain
from qualify.chain import infrastructure


@pytest.mark.parametrize(
    ("progress", "failed"),
    [
        ("tests/e2e/test_a.py ..s.", False),
        ("tests/e2e/test_a.py ..F", True),
        ("tests/e2e/test_a.py E", True),
        # pytest wraps at 80 columns, and names the file once
        (f"tests/e2e/test_a.py {'.' * 52} [ 26%]\n{'.' * 72} [ 62%]\n{'.' * 20}", False),
        (f"tests/e2e/test_a.py {'.' * 52} [ 26%]\n{'.' * 10}F{'.' * 61} [ 62%]\n{'.' * 20}", True),
        (f"tests/e2e/test_a.py {'.' * 52} [ 26%]\n..F..", True),
    ],
)
def test_a_case_that_had_failed_is_no_infrastructures_fault_wherever_its_line_was_wrapped(
    progress: str, failed: bool
) -> None:
    after = (
        "nox > Command python -m pytest failed with exit code -15\n",
        "\nOSError: [Errno 28] No space left on device\nnox > Command python -m pytest failed with exit code 1\n",
    )
    causes = [infrastructure("e2e", f"collected 200 items\n\n{progress}{end}") for end in after]
    assert causes == ([None, None] if failed else ["interrupted", "disk-full"])


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        ("nox > Command ruff check failed with exit code 1\nnox > Session lint failed.\n", True),
        ("nox > Command ruff check failed with exit code -9\nnox > Session lint failed.\n", False),
        ("nox > Session lint was successful.\n", False),
        ("..F.", True),
        ("", False),
    ],
)
def test_a_log_without_a_record_shows_a_failure_or_not(end: str, failed: bool) -> None:
    """A tool that was killed may have been ended by the gate: that is none."""
    assert chain.failed(f"nox > Running session lint\n{end}") is failed
