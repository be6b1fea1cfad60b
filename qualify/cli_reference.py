# SPDX-License-Identifier: Apache-2.0
"""The option tables of docs/cli.md, written from the options themselves.

``python -m qualify.cli_reference`` rewrites the part of the document between its two markers; a unit test
fails when the document and the options differ.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Any

import typer

from afd_plugin.cli.app import app

DOCUMENT = Path(__file__).parents[1] / "docs" / "cli.md"
BEGIN = "<!-- options: begin (python -m qualify.cli_reference) -->"
END = "<!-- options: end -->"


def reference() -> str:
    """One section per command: what it does, its arguments and options with defaults."""
    group: Any = typer.main.get_command(app)
    return "\n".join(_section(name, command) for name, command in group.commands.items())


def _section(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join(
        ["afd", name, *(one.name.upper() if one.required else f"[{one.name.upper()}]" for one in arguments)]
    )
    lines = [f"### `{usage}`", "", command.help, ""]
    lines += ["| option | default | meaning |", "|---|---|---|"]
    for one in command.params:
        if one.name == "help":
            continue
        names = (
            one.name.upper()
            if one.param_type_name == "argument"
            else " / ".join([*one.opts, *one.secondary_opts])
        )
        lines.append(f"| `{names}` | {_default(one)} | {one.help} |")
    if command.epilog:
        lines += ["", command.epilog]
    return "\n".join(lines) + "\n"


def _default(option: Any) -> str:
    value = option.default
    if option.required:
        return "required"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if value not in (None, "") else ""


def updated(document: str) -> str:
    """``document`` with its generated part made anew; ValueError when a marker is missing."""
    before, marker, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise ValueError(f"the document lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def main() -> int:
    """Rewrite the document in place; returns 1 when it changed."""
    old = DOCUMENT.read_text(encoding="utf-8")
    new = updated(old)
    DOCUMENT.write_text(new, encoding="utf-8")
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
