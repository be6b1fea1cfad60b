# SPDX-License-Identifier: Apache-2.0
"""The documents say what the evidence says, and what they tell a reader to run exists.

`python -m qualify.docs` checks; `--write` renews the generated parts from the ledgers as they are now. A
generated part names the revision and the records that it was made from, and is checked against exactly these;
records that are committed beside an older text make the text stale.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from qualify import gate, ledger, report, support
from qualify.cells import ROOT, load
from qualify.lint import text
from qualify.lint.__main__ import tracked
from qualify.lint.findings import Finding
from qualify.process import CommandError, capture
from qualify.report import Evidence
from qualify.revision import GENERATED_FILES, GENERATED_REGIONS

SUPPORT = GENERATED_FILES[0]
HISTORICAL = ("docs/upgrades/", "CHANGELOG.md")
"""Where other versions stand on purpose."""

_RENEW = "`nox -s docs -- --write` renews it"
_REGION = re.compile(r"(<!-- generated: support -->\n).*?(<!-- end: support -->)", re.DOTALL)
_STATED = re.compile(r"^Revision `(?P<revision>[0-9a-f]{64})`; records: (?P<records>.*)\.$", re.MULTILINE)
_FENCE = re.compile(r"^```(?:sh|bash|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")


def stated(evidence: Evidence) -> str:
    """The line that says what a generated part was made from."""
    counts = ", ".join(f"{name} {len(records)}" for name, records in evidence.ledgers.items())
    return f"Revision `{evidence.revision}`; records: {counts}."


def generated(evidence: Evidence) -> Mapping[str, str]:
    """What stands in each generated file or region."""
    line = stated(evidence)
    return {
        SUPPORT: f"{report.markdown(evidence)}\n{line}\n",
        "README.md": f"{support.table(evidence.rows())}\n{line}\n",
    }


def with_region(page: str, content: str) -> str:
    """`page` with its generated region replaced; unchanged when it has none."""
    return _REGION.sub(lambda match: f"{match[1]}{content}{match[2]}", page)


def write(root: Path = ROOT) -> tuple[str, ...]:
    """Renew every generated part; the paths written."""
    parts = generated(Evidence(root))
    (root / SUPPORT).write_text(parts[SUPPORT], encoding="utf-8")
    for name in GENERATED_REGIONS:
        path = root / name
        path.write_text(with_region(path.read_text(encoding="utf-8"), parts[name]), encoding="utf-8")
    return (SUPPORT, *GENERATED_REGIONS)


def stale(root: Path = ROOT) -> Iterator[Finding]:
    """Each generated part that is not what the records it names allow, or that newer committed records outdate."""
    committed = {name: _committed(root, name) for name in Evidence(root).cells}
    for name in (*GENERATED_FILES, *GENERATED_REGIONS):
        path = root / name
        page = path.read_text(encoding="utf-8") if path.is_file() else ""
        match = _STATED.search(page)
        if match is None:
            yield Finding(name, 1, "stale", f"names no records that it was made from; {_RENEW}")
            continue
        counts = {cell: int(count) for cell, count in re.findall(r"(\S+) (\d+)", match["records"])}
        wanted = generated(_as_of(root, match["revision"], counts))[name]
        if page != (wanted if name in GENERATED_FILES else with_region(page, wanted)):
            yield Finding(name, 1, "stale", f"says something else than the records that it names; {_RENEW}")
        for cell, count in committed.items():
            if count > counts.get(cell, 0):
                yield Finding(name, 1, "stale", f"is older than the committed evidence of {cell}; {_RENEW}")


def _as_of(root: Path, revision: str, counts: Mapping[str, int]) -> Evidence:
    """The evidence as it was when a generated part was made."""
    evidence = Evidence(root)
    evidence.revision = revision
    for cell, records in evidence.ledgers.items():
        evidence.ledgers[cell] = records[: counts.get(cell, 0)]
    return evidence


def _committed(root: Path, cell: str) -> int:
    done = capture(["git", "show", f"HEAD:evidence/{cell}.jsonl"], cwd=root, check=False)
    return len(ledger.decode(done.stdout.encode())) if done.returncode == 0 else 0


def pins(pages: Mapping[str, str], vllm: str, torch: str) -> Iterator[Finding]:
    """Each version of vLLM or torch in the documents that is not the cell's."""
    for name, page in pages.items():
        if name.startswith(HISTORICAL):
            continue
        for product, wanted in (("vllm(?:-cpu)?", vllm), ("torch", torch.partition("+")[0])):
            for match in re.finditer(rf"\b{product}(?:==|`? )v?(\d+\.\d+\.\d+)", page, re.IGNORECASE):
                if match[1] != wanted:
                    line = page.count("\n", 0, match.start()) + 1
                    yield Finding(name, line, "pin", f"says {match[0]!r}, the cell has {wanted}")


def commands(page: str) -> Iterator[tuple[int, str]]:
    """Each command line that a page shows, with its line: in shell blocks and in code spans."""
    for block in _FENCE.finditer(page):
        first = page.count("\n", 0, block.start()) + 2
        joined = re.sub(r"\\\n\s*", " ", block[1])
        for offset, line in enumerate(joined.splitlines()):
            for command in re.split(r"&&|;", line.partition(" #")[0]):
                yield first + offset, command.strip().removeprefix("$ ")
    for span in _SPAN.finditer(page):
        yield page.count("\n", 0, span.start()) + 1, span[1]


def unknown_command(command: str, sessions: frozenset[str], helps: Mapping[str, str]) -> str:
    """Why a command of this project cannot run; empty when it can, or when it is not this project's."""
    words = command.split()
    own = words[: words.index("--")] if "--" in words else words
    if words[:2] == ["nox", "-s"]:
        missing = [
            word
            for word in own[2:]
            if not word.startswith("-") and word.isidentifier() and word not in sessions
        ]
        return f"no session is called {missing[0]}" if missing else ""
    if (
        words[:2] == ["python", "-m"]
        and len(words) > 2
        and words[2].split(".")[0] in ("qualify", "afd_plugin")
    ):
        try:
            return "" if find_spec(words[2]) else f"no module is called {words[2]}"
        except ModuleNotFoundError:
            return f"no module is called {words[2]}"
    if words[:1] == ["afd"] and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
        if words[1] not in helps:
            return f"`afd` has no command {words[1]}"
        known = set(re.findall(r"--[a-z][a-z-]*", helps[words[1]]))
        ours = [word.partition("=")[0] for word in own[2:] if word.startswith("--")]
        passes_on = words[1] in ("serve", "attention", "ffn")  # what they do not know is vLLM's
        if not passes_on and (stray := [word for word in ours if word not in known]):
            return f"`afd {words[1]}` has no option {stray[0]}"
    return ""


def check_commands(
    pages: Mapping[str, str], sessions: frozenset[str], helps: Mapping[str, str]
) -> Iterator[Finding]:
    """Each command in the documents that does not exist."""
    for name, page in pages.items():
        for line, command in commands(page):
            if why := unknown_command(command, sessions, helps):
                yield Finding(name, line, "command", f"`{command[:80]}`: {why}")


def help_texts() -> dict[str, str]:
    """What `afd COMMAND --help` prints, by command."""
    base = [sys.executable, "-m", "afd_plugin.cli"]
    listing = capture([*base, "--help"], timeout_s=60).stdout
    names = re.findall(r"^[│|]? *([a-z]+)  ", listing, re.MULTILINE)
    return {name: capture([*base, name, "--help"], timeout_s=60, check=False).stdout for name in names}


def check(root: Path = ROOT) -> list[Finding]:
    """Every finding in the documents of a checkout."""
    names = tracked(root)
    pages = {name: (root / name).read_text(encoding="utf-8") for name in names if name.endswith(".md")}
    cell = load("cpu")
    findings = [finding for name, page in pages.items() for finding in text.links(name, page, names)]
    findings += pins(pages, cell.vllm, cell.torch)
    findings += check_commands(pages, gate.known_sessions(root), help_texts())
    return sorted([*findings, *stale(root)])


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when text and evidence agree, 1 when not."""
    parser = argparse.ArgumentParser(prog="python -m qualify.docs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the generated parts")
    try:
        if parser.parse_args(arguments).write:
            print(*write(), sep="\n")
            return 0
        findings = check()
    except (CommandError, ledger.LedgerError, OSError, subprocess.SubprocessError) as error:
        print(f"docs: {error}", file=sys.stderr)
        return 2
    print(*findings, f"{len(findings)} findings in the documents", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
