# SPDX-License-Identifier: Apache-2.0
"""`python -m qualify.upgrade audit|lookahead|align`: plan an upgrade, look at a newer vLLM, record the review.

A source of vLLM is a release (`0.30.0`: its wheel comes from your index into the cache), a file (wheel or sdist),
a folder `vllm`, or `CLONE@REVISION`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from afd_plugin.seams import REGISTRY
from qualify.audit.upstream import UpstreamError, package_root
from qualify.phases import PhaseError
from qualify.upgrade import (
    align,
    decisions,
    dependencies,
    fetch,
    freeze,
    lookahead,
    planning,
    report,
    toml,
    trees,
)

ROOT = Path(__file__).resolve().parents[2]
UPGRADES = Path("docs/upgrades")
FAILURES = (
    align.AlignmentError,
    fetch.FetchError,
    toml.RecordError,
    trees.TreeError,
    UpstreamError,
    PhaseError,
)
"""What a command fails with in a sentence: exit code 2."""


@contextlib.contextmanager
def source(text: str) -> Iterator[trees.Tree]:
    """The tree that a command line names."""
    clone, at, revision = text.partition("@")
    if at:
        with trees.opened(Path(clone), revision) as tree:
            yield tree
        return
    path = Path(text)
    with trees.opened(path if path.exists() else fetch.wheel(text)) as tree:
        yield tree


def audit(chosen: argparse.Namespace) -> int:
    """Read-only planning audit of CURRENT to TARGET; the report goes to the terminal or to --output.

    Exit 0 when every phase in scope passed, 1 when one blocked or stopped.
    """
    with source(chosen.current) as current, source(chosen.target) as target:
        name = f"{current.identity.version}-to-{target.identity.version}.toml"
        data = chosen.task or ROOT / UPGRADES / name
        request = planning.Request(
            ROOT,
            "afd_plugin",
            current,
            target,
            freeze.read_task(data),
            () if chosen.no_decisions else decisions.load(ROOT / decisions.FOLDER),
            dependencies.touched(),
            REGISTRY,
        )
        result = planning.run(request)
    flags = " --no-decisions" if chosen.no_decisions else ""
    command = f"python -m qualify.upgrade audit {shlex.quote(current.identity.version)}"
    command = f"{command} {shlex.quote(target.identity.version)}{flags}"
    _deliver(report.render(result, command, _today().isoformat()), chosen.output)
    took = ", ".join(f"{name} {seconds} s" for name, seconds in result.seconds.items())
    print(f"{result.workflow.readiness()} ({took})", file=sys.stderr)
    return 0 if result.workflow.stopped_by is None else 1


def look(chosen: argparse.Namespace) -> int:
    """Which of our seams break in VERSION, and how, from its wheel alone; exit 0: this is no gate."""
    with contextlib.ExitStack() as opened:
        ahead = opened.enter_context(source(chosen.version))
        here = source(chosen.current) if chosen.current else trees.opened(package_root("vllm"))
        outlook = lookahead.look(opened.enter_context(here), ahead, REGISTRY)
    _deliver(lookahead.render(outlook), chosen.output)
    return 0


def review(chosen: argparse.Namespace) -> int:
    """Record the monthly decision to stay or to upgrade; `align --due` only says whether one is due (exit 1)."""
    today = _today()
    folder = ROOT / decisions.FOLDER
    if chosen.due:
        why = align.overdue(decisions.load(folder), today)
        print(why or "the alignment review is up to date")
        return 1 if why else 0
    missing = [n for n in ("course", "latest", "reason", "decided_by") if not vars(chosen)[n]]
    if missing:
        raise align.AlignmentError(f"a review needs {', '.join('--' + m.replace('_', '-') for m in missing)}")
    version = toml.read(ROOT / "pyproject.toml")["project"]["version"].split(".post")[0]
    taken = align.Review(
        day=today,
        current=version,
        latest=chosen.latest,
        course=align.Course(chosen.course),
        target=chosen.target,
        reason=chosen.reason,
        exception=chosen.exception,
        decided_by=chosen.decided_by,
    )
    print(align.record(taken, folder).relative_to(ROOT))
    return 0


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()


def _deliver(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")


def add_align(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `align`, which `python -m qualify` offers too."""
    parser = commands.add_parser("align", help=review.__doc__)
    parser.add_argument("course", nargs="?", choices=[course.value for course in align.Course])
    parser.add_argument("--latest", default="", help="the newest stable vLLM release that was seen")
    parser.add_argument("--target", default="", help="the release to upgrade to")
    parser.add_argument("--reason", default="")
    parser.add_argument("--exception", default="", help="why an upgrade out of turn, or a longer stay")
    parser.add_argument("--decided-by", default="")
    parser.add_argument("--due", action="store_true", help="only say whether a review is due")
    parser.set_defaults(run=review)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 2 for a request that makes no sense or a source that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m qualify.upgrade", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("audit", help=audit.__doc__)
    one.add_argument("current", help="a source of the current vLLM")
    one.add_argument("target", help="a source of the target vLLM")
    one.add_argument(
        "--task", type=Path, help="the upgrade's data, by default docs/upgrades/CURRENT-to-TARGET.toml"
    )
    one.add_argument("--no-decisions", action="store_true", help="as if no decision were recorded")
    one.add_argument("--output", type=Path, help="write the report here: the only thing that is written")
    one.set_defaults(run=audit)
    two = commands.add_parser("lookahead", help=look.__doc__)
    two.add_argument("version", help="a source of the newer vLLM")
    two.add_argument("--current", help="a source of our vLLM instead of the installed one")
    two.add_argument("--output", type=Path)
    two.set_defaults(run=look)
    add_align(commands)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except FAILURES as error:
        print(f"qualify.upgrade: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
