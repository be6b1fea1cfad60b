# SPDX-License-Identifier: Apache-2.0
"""The session chain as data: which sessions, in which order, with which cases, for which profile."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from qualify.cells import Cell
from qualify.phases import Phase

LANDING_LIMIT_S = 3600.0
SHARD_LIMIT_S = 2400.0
SHARDS, GPU_SHARDS = 6, 3
"""Of the full scope of e2e on the CPU cell, about three hours on two cores, and on a GPU cell."""

ATTEMPTS = 3
GPU_FREE = "cpu"
"""The cell whose chain holds what needs no GPU; the chains of other cells do not run it again."""


class Profile(str, enum.Enum):
    """`landing` is a diagnosis before a change lands; only `qualifying` supports a release."""

    LANDING = "landing"
    QUALIFYING = "qualifying"


@dataclass(frozen=True)
class Part:
    """One session, or one shard of it: what is run, and which list of cases it must run whole."""

    session: str
    phase: Phase
    suite: str = ""
    shard: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The part's name in the ledger."""
        return self.session, self.shard

    @property
    def title(self) -> str:
        """The part's name for a reader."""
        return f"{self.session} {self.shard}".strip()

    @property
    def command(self) -> tuple[str, ...]:
        """The words after `python`; nothing of this machine is in them, so they can stand in a record."""
        words = ("-m", "nox", "-s", self.session)
        return (*words, "--", *self.arguments) if self.arguments else words


STATIC = (
    Part("lint", Phase.STATIC_AND_UNIT_GATE),
    Part("typecheck", Phase.STATIC_AND_UNIT_GATE),
    Part("unit", Phase.STATIC_AND_UNIT_GATE, "unit"),
    Part("package", Phase.STATIC_AND_UNIT_GATE),
    Part("audit", Phase.STATIC_AND_UNIT_GATE),
    Part("abi", Phase.STATIC_AND_UNIT_GATE),
)
DOCUMENTS = (Part("docs", Phase.DOCUMENTATION_REFRESH_GATE),)


def parts(cell: Cell, profile: Profile) -> tuple[Part, ...]:
    """Every part that a chain of `profile` on `cell` runs, in order. `final_audit` is the last.

    A GPU cell's chain is what needs its GPU. The rest does not depend on a device, wants tools and an index that a GPU
    host may not have, and is demanded of the same revision on the cell `GPU_FREE` (:func:`gpu_free`).
    """
    where = ("--cell", cell.name)
    e2e = "e2e" if cell.devices == 0 else "gpu_e2e"
    suite = e2e if cell.devices < 2 else f"{e2e}_x{cell.devices}"
    on = where if cell.devices else ()
    before, after = ((), ()) if cell.devices else (STATIC, DOCUMENTS)
    if profile is Profile.LANDING:
        runs: tuple[Part, ...] = (Part(e2e, Phase.BASIC_E2E_GATE, suite, arguments=on),)
    else:
        number = GPU_SHARDS if cell.devices else SHARDS
        runs = tuple(
            Part(e2e, Phase.BASIC_E2E_GATE, f"{suite}_all", f"{shard}/{number}", ("all", *on))
            for shard in range(1, number + 1)
        )
    return (
        *before,
        Part("native_control", Phase.TARGET_NATIVE_CONTROL, arguments=where),
        *runs,
        Part("accuracy", Phase.ACCURACY_GATE, arguments=where),
        *after,
        Part("final_audit", Phase.FINAL_AUDIT, arguments=(*where, "--profile", profile.value)),
    )


def gpu_free(cell: Cell) -> tuple[Part, ...]:
    """What a GPU cell's chain leaves to the chain of `GPU_FREE` at the same revision; nothing for that cell itself."""
    return (*STATIC, *DOCUMENTS) if cell.devices else ()


@dataclass(frozen=True)
class Infrastructure:
    """A named reason outside the project for which a session may be tried again."""

    name: str
    sessions: frozenset[str]
    seen: re.Pattern[str]
    unless: re.Pattern[str] | None = None


FAILED_CASE = re.compile(
    r"^(?:tests/\S+\.py [.sxX]*[FE]|[.sxX]*[FE][.sxXFE]*(?: *\[ *\d+%\]|nox > .*)?$)", re.MULTILINE
)
"""A case that had failed when pytest was ended, in its lines of progress: that is the project's, whatever came after.

Only a file's first line has its name; what comes after a pytest that was ended stands in the same line.
"""

FAILED_SESSION = re.compile(r"^nox > Session \S+ failed", re.MULTILINE)
KILLED = re.compile(r"nox > Command .* failed with exit code -9$", re.MULTILINE)
INTERRUPTED = "interrupted"

INFRASTRUCTURE = (
    Infrastructure(
        "index-unreachable",
        frozenset({"package"}),
        re.compile(
            r"Could not fetch URL|ReadTimeoutError|Connection (?:reset|refused|timed out)|name resolution"
        ),
    ),
    Infrastructure(
        "disk-full", frozenset(), re.compile(r"\[Errno 28\]|No space left on device"), FAILED_CASE
    ),
    # somebody ended the session's own tool, pytest say, by SIGINT or SIGTERM
    Infrastructure(
        INTERRUPTED,
        frozenset(),
        re.compile(
            r"^(?:tests/\S+\.py )?[.sxXFE]*nox > Command .* failed with exit code -(?:2|15)$", re.MULTILINE
        ),
        FAILED_CASE,
    ),
)


def infrastructure(session: str, log: str) -> str | None:
    """The name of the infrastructure fault that a failed session's log shows, if it is one of the listed."""
    for fault in INFRASTRUCTURE:
        applies = not fault.sessions or session in fault.sessions
        if applies and fault.seen.search(log) and not (fault.unless and fault.unless.search(log)):
            return fault.name
    return None


def failed(log: str) -> bool:
    """Whether the log of a session that nobody waited for shows that it failed: a case of it, or all of it by itself.

    A tool that was killed may have been ended by the gate.
    """
    return bool(FAILED_CASE.search(log) or (FAILED_SESSION.search(log) and not KILLED.search(log)))
