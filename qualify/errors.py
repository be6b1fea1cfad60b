# SPDX-License-Identifier: Apache-2.0
"""`python -m qualify.errors` writes docs/errors.md from the error classes themselves; a test compares them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import afd_plugin.cli.child
import afd_plugin.control.messages
import afd_plugin.demo.service
import afd_plugin.v1.refusals  # noqa: F401  (these define errors beside afd_plugin.errors)
from afd_plugin.errors import AFDError

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "errors.md"

HEAD = """\
# Errors by name

Every refusal and every failure that `afd` foresees has a name, in logs before the sentence (`peer-lost: ...`) and in
events (`error=peer-lost`). This page is generated from the classes (`python -m qualify.errors`).

Exit codes: 2 the input was refused before anything was served, 3 a peer was lost or failed, 4 the roles did not find
each other in time, 1 anything else.

| name | exit | meaning | what helps |
|---|---|---|---|
"""

TAIL = """
The launcher has names of its own for what it sees from outside:

| name | exit | meaning | what helps |
|---|---|---|---|
"""

LAUNCHER = (
    (
        "child-died",
        1,
        "A process ended without saying why: a signal, or an exit code.",
        "The log above; when nothing is said there, the system's log (out of memory?).",
    ),
    (
        "process-stopped",
        1,
        "A process was stopped (SIGSTOP) for two looks in a row and has been ended.",
        "Do not stop single processes of a service.",
    ),
    (
        "startup-timeout",
        4,
        "The service was not ready in time; the phases say what it was waiting for.",
        "Raise --startup-timeout for large models.",
    ),
    (
        "unclean-stop",
        1,
        "Something had to be ended by SIGKILL although nothing had failed.",
        "Report it with the log.",
    ),
    (
        "interrupted",
        1,
        "A second signal ended the service before its clean stop was done.",
        "Send one signal and wait.",
    ),
    (
        "guardian-died",
        1,
        "The process that cleans up after a killed launcher was ended or stopped.",
        "Leave it alone.",
    ),
)


def _classes() -> Iterator[type[AFDError]]:
    open_classes: list[type[AFDError]] = [AFDError]
    while open_classes:
        kind = open_classes.pop(0)
        if kind is not AFDError and kind.__module__.startswith("afd_plugin."):
            yield kind
        open_classes.extend(sorted(kind.__subclasses__(), key=lambda one: one.name))


def render() -> str:
    """The page's text."""
    rows: dict[str, str] = {}
    for kind in _classes():
        meaning = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.setdefault(kind.name, f"| `{kind.name}` | {kind.exit_code} | {meaning} | {kind.mend} |\n")
    launcher = (f"| `{name}` | {code} | {text} | {mend} |\n" for name, code, text, mend in LAUNCHER)
    return HEAD + "".join(rows[name] for name in sorted(rows)) + TAIL + "".join(launcher)


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
