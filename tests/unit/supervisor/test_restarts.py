# SPDX-License-Identifier: Apache-2.0
"""A child with a restart policy comes back when its fault was its own, and only then, and only so often."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from afd_plugin.supervisor.restarts import Revivals, may_restart
from afd_plugin.supervisor.spec import ChildSpec, Fault, RestartPolicy
from tests.unit.supervisor.harness import LIMITS, SERVE, Run, child

POLICY = RestartPolicy(window=10.0, limit=2)
SPEC = ChildSpec("ffn-0", ("true",), {}, restart=POLICY)
FAULT = Fault("ffn-0", "engine-failed", "A worker died.", 1)


@pytest.mark.parametrize(
    ("failures", "exit_code", "expected"),
    [
        ((), 1, True),
        ((), 2, False),
        ((), 3, False),
        ((), 4, False),
        ((99.0,), 1, True),
        ((98.0, 99.0), 1, False),
        ((-1.0, 99.0), 1, True),
    ],
)
def test_only_a_fault_of_its_own_and_not_too_often(
    failures: tuple[float, ...], exit_code: int, expected: bool
) -> None:
    assert may_restart(POLICY, failures, 100.0, exit_code) is expected


def test_what_is_reported_of_a_failed_child_until_its_successor_runs_belongs_to_the_same_failure() -> None:
    revivals = Revivals(answer_s=4.0)
    assert revivals.absorb(SPEC, FAULT, True, 0.0)
    assert revivals.absorb(SPEC, replace(FAULT, error="peer-lost", exit_code=3), False, 1.0)
    assert not revivals.due("ffn-0", True, 3.9)
    assert revivals.due("ffn-0", False, 1.0)
    assert revivals.due("ffn-0", True, 4.0)
    revivals.started("ffn-0")
    assert not revivals.due("ffn-0", False, 5.0)
    assert not revivals.absorb(SPEC, replace(FAULT, exit_code=4), True, 5.0)
    assert [fault.error for fault in revivals.faults()] == ["engine-failed", "peer-lost"]
    assert list(revivals.overdue(10.0)) == []
    assert list(revivals.overdue(10.1)) == ["ffn-0"]
    assert revivals.ready("ffn-0") is not None
    assert not revivals
    assert revivals.count("ffn-0") == 1


def test_a_successor_that_fails_while_it_starts_is_followed_by_another_within_the_same_window() -> None:
    revivals = Revivals(answer_s=4.0)
    assert revivals.absorb(SPEC, FAULT, True, 0.0)
    revivals.started("ffn-0")
    assert revivals.absorb(SPEC, FAULT, True, 6.0)
    assert revivals.ready("ffn-0") is None
    assert list(revivals.overdue(10.1)) == ["ffn-0"]
    revivals.started("ffn-0")
    assert not revivals.absorb(SPEC, FAULT, True, 8.0), "the limit of two is reached"


@pytest.mark.parametrize(
    ("spec", "serving"), [(SPEC, False), (replace(SPEC, restart=None), True)], ids=["starting", "no-policy"]
)
def test_without_a_policy_or_a_complete_service_a_fault_is_a_fault(spec: ChildSpec, serving: bool) -> None:
    revivals = Revivals(answer_s=4.0)
    assert not revivals.absorb(spec, FAULT, serving, 0.0)
    assert not revivals


def lives(folder: Path, *bodies: str, **policy: float) -> ChildSpec:
    """A child whose n-th start runs the n-th body, and the last one from then on."""
    count = folder / "lives"
    text = f"""
    life = int(Path({str(count)!r}).read_text()) if Path({str(count)!r}).exists() else 0
    Path({str(count)!r}).write_text(str(life + 1))
    exec(compile({list(bodies)!r}[min(life, {len(bodies) - 1})], 'body', 'exec'))
    """
    restart = RestartPolicy(**{"window": 60.0, "limit": 3, **policy}, env={"AGAIN": "yes"})  # type: ignore[arg-type]
    return replace(child("ffn-0", text, order=1), restart=restart)


def keeper(folder: Path, starts: int) -> ChildSpec:
    """The other child: ends well once the first one has served often enough."""
    body = f"""
    report.phase('serving')
    while not (Path({str(folder)!r}) / 'served-{starts}').exists():
        stop.wait(0.02)
    """
    return child("attention-0", body)


FAILS = "report.phase('serving')\ncomplete()\nreport.failure(RuntimeError('planted'))\nsys.exit(1)"


def serves(folder: Path, number: int) -> str:
    served = f"Path({str(folder)!r}, 'served-{number}').write_text(os.environ.get('AGAIN', 'no'))"
    return f"report.phase('serving')\n{served}\nstop.wait()"


def test_a_child_that_failed_serves_again_with_its_own_variables_and_the_service_ends_well(
    tmp_path: Path,
) -> None:
    spec = lives(tmp_path, FAILS, "os.kill(os.getpid(), signal.SIGKILL)", serves(tmp_path, 1))
    run = Run(tmp_path, spec, keeper(tmp_path, 1))
    assert run.outcome.exit_code == 0, run.log
    assert (tmp_path / "served-1").read_text() == "yes"
    assert run.log.count("started ffn-0") == 3
    assert "ffn-0 serves again" in run.log
    assert len(run.ready) == 1, "the service is ready once"
    assert not run.left()


def test_a_child_that_does_not_come_back_in_time_is_the_fault_that_it_first_was(tmp_path: Path) -> None:
    spec = lives(tmp_path, FAILS, "stop.wait()", window=1.0)
    run = Run(tmp_path, spec, child("attention-0", SERVE))
    assert run.outcome.cause is not None
    assert (run.outcome.exit_code, run.outcome.cause.error) == (1, "RuntimeError"), run.log
    assert "has not come back in time" in run.log
    assert not run.left()


def test_a_child_that_keeps_failing_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path, lives(tmp_path, FAILS, limit=2), child("attention-0", SERVE))
    assert run.outcome.exit_code == 1
    assert run.log.count("started ffn-0") == 3
    assert not run.left()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("report.phase('serving')\ncomplete()\nreport.failure(PeerLost('gone'))\nsys.exit(3)", 3),
        ("report.phase('serving')\ncomplete()\nreport.failure(ConfigRefused('no'))\nsys.exit(2)", 2),
        ("report.phase('serving')\ncomplete()", 0),
        ("report.failure(RuntimeError('planted'))\nsys.exit(1)", 1),
    ],
    ids=["lost-its-peer", "refused", "ended-well", "while-starting"],
)
def test_what_is_no_fault_of_its_own_or_no_service_yet_is_not_started_again(
    tmp_path: Path, body: str, code: int
) -> None:
    run = Run(tmp_path, lives(tmp_path, body), child("attention-0", SERVE))
    assert run.outcome.exit_code == code, run.log
    assert run.log.count("started ffn-0") == 1
    assert not run.left()


def test_a_stop_while_a_child_is_down_is_the_fault_of_that_child(tmp_path: Path) -> None:
    # The failed child stays until the other has ended, so that the request to stop finds the service incomplete.
    stays = f"{FAILS.removesuffix('sys.exit(1)')}logged('attention-0 exited with code 0')"
    ends = child("attention-0", "report.phase('serving')\nlogged('ffn-0 failed')")
    run = Run(tmp_path, lives(tmp_path, stays), ends, limits=replace(LIMITS, failure=60.0))
    assert run.outcome.exit_code == 1, run.log
    assert not run.left()
