# SPDX-License-Identifier: Apache-2.0
"""The gate: freeze the identity, run the session chain in its order, write a record for each, stop at a fault.

`python -m qualify.gate --cell cpu [--profile landing]`. A chain that was interrupted goes on where it stopped,
at the same revision, cell, lock and environment. A session that does not exist makes the chain BLOCKED there.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from afd_plugin.supervisor.signals import leave_by_exit
from qualify import expected, identity, ledger, progress, revision, sharding, verify
from qualify.cells import ROOT, Cell, CellError, load
from qualify.chain import (
    ATTEMPTS,
    FAILED_CASE,
    INTERRUPTED,
    LANDING_LIMIT_S,
    SHARD_LIMIT_S,
    Part,
    Profile,
    failed,
    infrastructure,
    parts,
)
from qualify.execution import Outcome, Running, attempt_folder, attempts
from qualify.identity import Binding
from qualify.ledger import Entry, LedgerError
from qualify.phases import Phase, PhaseError, Status
from qualify.process import CommandError, capture, tail

WORK = ".gate"


class Refused(RuntimeError):
    """The chain cannot go on here; the record that says why has been written."""


@dataclass(frozen=True)
class Attempt:
    """A part at work: which time it is tried, since when, and what follows when it has passed."""

    part: Part
    number: int
    following: str
    started: str
    running: Running


@dataclass
class Gate:
    """One run of the chain on one cell. `sessions` are the names that the noxfile has."""

    cell: Cell
    profile: Profile
    binding: Binding
    sessions: frozenset[str]
    host: str = "host unknown"
    root: Path = ROOT
    directory: Path = ledger.DIRECTORY
    spent_s: float = field(default=0.0, init=False)

    def open(self, faults: Sequence[str]) -> None:
        """Write the opening record; Refused when the identity is not the cell's."""
        status = Status.BLOCKED if faults else Status.PASS
        self._write(
            Part("", Phase.FREEZE_IDENTITY),
            status,
            blocker="; ".join(faults) or "none",
            evidence=(f"cell {self.cell.name}", f"revision {self.binding.revision}", self.host),
            action="mend what differs and start again" if faults else parts(self.cell, self.profile)[0].title,
        )
        if faults:
            raise Refused("FREEZE_IDENTITY is BLOCKED:\n  " + "\n  ".join(faults))

    def run(self, only: str = "", until: str = "") -> None:
        """Run every part that has no PASS yet, in order; Refused at the first that does not pass.

        `only` names the one session that is run, without those that a chain demands before it; `until` the last that
        is run now: the same command without it goes on after that one.
        """
        whole = parts(self.cell, self.profile)
        for name in (only, until):
            if name and name not in {part.session for part in whole}:
                raise Refused(f"a chain on {self.cell.name} has no session {name}")
        chain = [part for part in whole if only in ("", part.session)]
        if until:
            chain = chain[: 1 + max(i for i, part in enumerate(chain) if part.session == until)]
        self._refuse_standing(chain)
        done = {
            entry.key
            for entry in verify.of(ledger.read(self.cell.name, self.directory), self.binding, self.profile)
            if entry.status is Status.PASS
        }
        with ExitStack() as stack:
            beside: list[Attempt] = []
            try:
                for part in chain:
                    self._join(beside, wait=bool(beside) and part.session != beside[0].part.session)
                    after = whole.index(part) + 1
                    following = whole[after].title if after < len(whole) else "report"
                    if part.key in done:
                        print(f"{part.title}: PASS, on record", flush=True)
                    elif part.suite and sharding.waits(expected.listed(part.suite, self.root), part.shard):
                        begun = self._begin(part, following)
                        stack.enter_context(begun.running)
                        beside.append(begun)
                    else:
                        self._part(part, following)
                self._join(beside, wait=True)
            except BaseException as error:
                for begun in beside:
                    self._leave(begun, stopped=not isinstance(error, Refused))
                raise
        if self.profile is Profile.LANDING and self.spent_s > LANDING_LIMIT_S:
            print(f"this chain took {self.spent_s:.0f} s; a landing chain should take {LANDING_LIMIT_S:.0f}")

    def _join(self, beside: list[Attempt], *, wait: bool) -> None:
        """Conclude what ran beside other shards and is over, with `wait` all of it. An infrastructure fault of it is
        tried again, then alone.
        """
        for begun in [one for one in beside if wait or one.running.over]:
            beside.remove(begun)
            if not self._conclude(begun):
                self._part(begun.part, begun.following)

    def _check(self, part: Part) -> None:
        """Refused, with a record, where a part cannot be begun."""
        if part.session not in self.sessions:
            blocker = f"there is no session {part.session} yet"
            self._write(part, Status.BLOCKED, blocker=blocker, action=f"write the session {part.session}")
            raise Refused(f"{part.title} is BLOCKED: {blocker}")
        faults = expected.check_list(part.suite, self.root) if part.suite else ()
        if faults:
            self._write(part, Status.FAIL, blocker=_shown(faults), action="mend the list of cases")
            raise Refused(f"{part.title} is FAIL:\n  " + "\n  ".join(faults[:20]))

    def _part(self, part: Part, following: str) -> None:
        while True:  # `_begin` bounds it
            begun = self._begin(part, following)
            with begun.running:
                if self._conclude(begun):
                    return

    def _failures(self, part: Part) -> list[Entry]:
        before = verify.of(ledger.read(self.cell.name, self.directory), self.binding, self.profile)
        return [entry for entry in before if entry.key == part.key and entry.status is Status.FAIL]

    def _excused(self, part: Part) -> int:
        """How often infrastructure made it fail since it last failed by itself, over all runs of the gate."""
        causes = [entry.cause for entry in self._failures(part)]
        return next((age for age, cause in enumerate(reversed(causes)) if cause is None), len(causes))

    def _refuse_standing(self, chain: Sequence[Part]) -> None:
        if self.profile is not Profile.QUALIFYING:
            return
        keys, records = {part.key for part in chain}, ledger.read(self.cell.name, self.directory)
        for entry in verify.standing(records, self.binding.revision):
            if entry.key in keys:
                raise Refused(
                    f"{entry.title} failed at this revision; that stands until the revision is another"
                )

    def _begin(self, part: Part, following: str) -> Attempt:
        """Begin the next attempt at a part; Refused where it cannot be begun or none is left."""
        self._check(part)
        self._recover(part)
        self._refuse_standing([part])
        if self._excused(part) >= ATTEMPTS:
            raise Refused(f"{part.title} is FAIL after {ATTEMPTS} attempts at the same infrastructure fault")
        print(f"{part.title}: running", flush=True)
        number = len(self._failures(part)) + 1
        running = Running(part, attempt_folder(self._work, part.title, number), self.root)
        return Attempt(part, number, following, _now(), running)

    @property
    def _work(self) -> Path:
        """Where the logs of this chain lie: those of another ledger, cell or profile are none of its attempts."""
        ledger_of = hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:8]
        chain = f"{self.cell.name} {self.profile.value} {ledger_of}"
        return self.root / WORK / self.binding.revision[:12] / chain

    def _recover(self, part: Part) -> None:
        """Record an attempt that failed and has no record, because the gate was killed before it could write one."""
        records = ledger.read(self.cell.name, self.directory)
        known = {record.entry.logs.get("log") for record in records}
        for seen in attempts(self._work, part.title):
            if seen.log_digest not in known and failed(seen.log):
                cause = infrastructure(part.session, seen.log)
                number = len(self._failures(part)) + 1
                self._account(part, number, seen, ("it had failed when the gate was killed",), cause)

    def _leave(self, begun: Attempt, *, stopped: bool) -> None:
        """End a part for which nobody waits any more, and record what it has shown.

        One that was over is recorded as ever. Else a case that had failed is the project's; without one it was
        interrupted if the gate was `stopped`, and said nothing if another shard's failure ended it.
        """
        running, number = begun.running, begun.number
        if running.over:
            outcome = running.outcome(SHARD_LIMIT_S)
            with suppress(Refused):
                self._record(begun, outcome, self._faults(begun.part, outcome))
            return
        shown = FAILED_CASE.search(running.log())  # before its end, which may fail one
        outcome = running.outcome(0.0)
        if shown or stopped:
            said = "a case had failed when it was ended" if shown else "the gate was stopped while it ran"
            cause = None if shown else INTERRUPTED
            self._account(begun.part, number, outcome, (said,), cause, started=begun.started)

    def _conclude(self, begun: Attempt) -> bool:
        """Wait for a part and record it; False when it may be tried again."""
        try:
            outcome = begun.running.outcome(SHARD_LIMIT_S)
            faults = self._faults(begun.part, outcome)
        except BaseException:
            self._leave(begun, stopped=True)
            raise
        return self._record(begun, outcome, faults)

    def _record(self, begun: Attempt, outcome: Outcome, faults: Sequence[str]) -> bool:
        part = begun.part
        # what ran past its limit was ended by this gate
        cause = infrastructure(part.session, outcome.log) if faults and outcome.status is not None else None
        self._account(
            part, begun.number, outcome, faults, cause, started=begun.started, following=begun.following
        )
        if faults and cause is None:
            raise Refused(f"{part.title} is FAIL:\n  " + "\n  ".join(faults[:20]) + f"\n{tail(outcome.log)}")
        return not faults

    def _account(
        self,
        part: Part,
        number: int,
        outcome: Outcome,
        faults: Sequence[str],
        cause: str | None,
        *,
        started: str = "",
        following: str = "",
    ) -> None:
        self.spent_s += outcome.seconds
        self._write(
            part,
            Status.FAIL if faults else Status.PASS,
            blocker=_shown(faults),
            evidence=(f"`python {' '.join(part.command)}`", f"log {outcome.log_digest}"),
            action=("try again" if cause else "mend it") if faults else following,
            outcome=outcome,
            attempt=number,
            started=started,
            cause=cause,
        )
        print(f"{part.title}: {'FAIL' if faults else 'PASS'} in {outcome.seconds:.0f} s", flush=True)

    def _faults(self, part: Part, outcome: Outcome) -> tuple[str, ...]:
        said: list[str] = []
        if outcome.status != 0:
            ended = "ran past its limit" if outcome.status is None else f"exited with {outcome.status}"
            said.append(f"`nox -s {part.session}` {ended}")
        if part.suite:
            wanted = sharding.of_shard(expected.listed(part.suite, self.root), part.shard)
            if outcome.run is None:
                said.append("pytest left no account of its cases")
            else:
                said += expected.complaints(outcome.run, wanted)
        said += [f"left a process behind: {name}" for name in outcome.teardown.processes]
        said += [f"left shared memory behind: {name}" for name in outcome.teardown.files]
        said += [f"{path} changed while the session ran" for path in revision.dirty(self.root)]
        if revision.revision(self.root) != self.binding.revision:
            said.append("HEAD moved while the session ran")
        return tuple(said)

    def _write(
        self,
        part: Part,
        status: Status,
        *,
        blocker: str,
        action: str,
        evidence: tuple[str, ...] = (),
        outcome: Outcome | None = None,
        attempt: int = 1,
        started: str = "",
        cause: str | None = None,
    ) -> None:
        wanted = sharding.of_shard(expected.listed(part.suite, self.root), part.shard) if part.suite else {}
        entry = Entry(
            cell=self.binding.cell,
            lock=self.binding.lock,
            revision=self.binding.revision,
            environment=self.binding.environment,
            profile=self.profile.value,
            session=part.session,
            shard=part.shard,
            attempt=attempt,
            phase=part.phase,
            status=status,
            evidence=evidence,
            blocker=blocker,
            next_allowed_action=action,
            command=("python", *part.command) if part.session else (),
            started=started or _now(),
            seconds=outcome.seconds if outcome else 0.0,
            counts=outcome.run.counts() if outcome and outcome.run else None,
            expected=expected.digest(wanted) if part.suite else None,
            metrics=outcome.metrics if outcome else {},
            logs={**outcome.digests, "log": outcome.log_digest} if outcome else {},
            teardown=outcome.teardown if outcome else ledger.Teardown(),
            cause=cause,
        )
        ledger.append(entry, self.directory)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _shown(faults: Sequence[str], limit: int = 10) -> str:
    more = f" and {len(faults) - limit} more" if len(faults) > limit else ""
    return "; ".join(faults[:limit]) + more if faults else "none"


def known_sessions(root: Path = ROOT) -> frozenset[str]:
    """The sessions of the noxfile."""
    listed = capture([sys.executable, "-m", "nox", "--list-sessions"], cwd=root).stdout
    return frozenset(re.findall(r"^[*-] (\w+)", listed, re.MULTILINE))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the chain is complete, 1 when it stopped, 2 for a bad request."""
    parser = argparse.ArgumentParser(prog="python -m qualify.gate", description=__doc__)
    parser.add_argument("--cell", required=True, help="a cell of containers/cells.toml")
    parser.add_argument("--profile", choices=[p.value for p in Profile], default=Profile.QUALIFYING.value)
    parser.add_argument("--evidence", type=Path, default=ledger.DIRECTORY, help="another ledger directory")
    parser.add_argument("--only", default="", help="one session alone; needs another --evidence directory")
    parser.add_argument(
        "--until", default="", help="the last session that is run now; go on without it later"
    )
    chosen = parser.parse_args(arguments)
    if chosen.only and chosen.until:
        parser.error("--only runs one session; --until has no place beside it")
    if chosen.only and chosen.evidence.resolve() == ledger.DIRECTORY.resolve():
        parser.error("--only makes no evidence: give it another --evidence directory")
    profile, started = Profile(chosen.profile), time.monotonic()
    try:
        cell = load(chosen.cell)
        seen = identity.observe()
        faults = [*identity.reconcile(cell, seen), *(f"dirty tree: {path}" for path in revision.dirty(ROOT))]
        binding = identity.bind(cell, seen)
        gate = Gate(cell, profile, binding, known_sessions(), seen.host(), directory=chosen.evidence)
        gate.open(faults)
        gate.run(chosen.only, chosen.until)
        if chosen.only or chosen.until:
            return 0
        records = ledger.read(cell.name, chosen.evidence)
        state = progress.workflow(cell, profile, binding, records, ROOT / progress.PLAN, chosen.evidence)
        print(progress.shown(cell, profile, state))
        verdict = verify.verify(cell, binding, profile, directory=chosen.evidence)
    except (CellError, LedgerError, CommandError, PhaseError) as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    except Refused as refusal:
        print(f"\ngate on {chosen.cell} ({profile.value}): {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngate: stopped; the same command goes on from here", file=sys.stderr)
        return 128 + signal.SIGINT
    print(*verdict.faults, *verdict.missing, sep="\n")
    print(f"gate on {cell.name} ({profile.value}): {'PASS' if verdict.whole else 'not complete'} "
          f"in {time.monotonic() - started:.0f} s, head {verdict.head}")  # fmt: skip
    return 0 if verdict.whole else 1


def heed_signals() -> None:
    """SIGTERM and SIGHUP stop the gate as Ctrl-C does, with a record of what ran; SIGHUP not under `nohup`."""
    before = signal.getsignal(signal.SIGHUP)
    leave_by_exit()
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, before)


if __name__ == "__main__":
    heed_signals()
    sys.exit(main())
