# SPDX-License-Identifier: Apache-2.0
"""May this tag be released? `nox -s release_check -- v0.28.0` says, and prints the push command instead of pushing.

A tag is releasable when the tree is clean, the tag names the version and this commit, the evidence of the
qualifying chain is whole, belongs to this revision and ends in the head that the annotated tag carries, and the
artifacts are exactly those that are published.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from qualify import docs, ledger, revision, sbom, verify
from qualify.cells import CELLS, ROOT, Cell, load, parse
from qualify.chain import Profile
from qualify.package import mirrored, project_version
from qualify.process import CommandError, capture

CELL = "cpu"
HEAD_LINE = re.compile(r"^evidence-head (?P<cell>[\w-]+): (?P<hash>[0-9a-f]{64})$", re.MULTILINE)
"""How an annotated tag's message carries the head of a cell's ledger."""


def artifacts(version: str) -> tuple[str, ...]:
    """The exact set of files that a release publishes."""
    return (
        f"afd_plugin-{version}-py3-none-any.whl",
        f"afd_plugin-{version}.cdx.json",
        f"afd_plugin-{version}.tar.gz",
        "SHA256SUMS",
    )


def tag_complaints(
    tag: str, version: str, vllm: str, root: Path = ROOT
) -> tuple[tuple[str, ...], dict[str, str]]:
    """What is wrong with a tag, and the evidence heads that it carries by cell."""
    said = []
    if not mirrored(version, vllm):
        said.append(f"version {version} is not {vllm} or {vllm}.postN: versions mirror the vLLM release")
    if tag != f"v{version}":
        said.append(f"the tag is {tag}, the version wants v{version}")
    kind = capture(["git", "cat-file", "-t", tag], cwd=root, check=False)
    if kind.returncode:
        return (*said, f"there is no tag {tag}"), {}
    if kind.stdout.strip() != "tag":
        return (*said, f"{tag} is not an annotated tag, so it carries no evidence head"), {}
    at = capture(["git", "rev-parse", f"{tag}^{{commit}}", "HEAD"], cwd=root).stdout.split()
    if at[0] != at[1]:
        said.append(f"{tag} is on {at[0][:12]}, HEAD is {at[1][:12]}")
    message = capture(["git", "tag", "-l", "--format=%(contents)", tag], cwd=root).stdout
    return tuple(said), {match["cell"]: match["hash"] for match in HEAD_LINE.finditer(message)}


def evidence_complaints(cell: Cell, head: str | None, root: Path = ROOT) -> tuple[str, ...]:
    """Why the evidence of a cell does not carry a release of this commit."""
    if head is None:
        return (f"the tag carries no line `evidence-head {cell.name}: HASH`",)
    directory = root / "evidence"
    now, lock = revision.revision(root), cell.lock_digest(root)
    records, faults = verify.up_to(ledger.read(cell.name, directory), head)
    binding = verify.latest(records, cell.name, lock, now, Profile.QUALIFYING)
    if faults or binding is None:
        return faults or (
            f"no qualifying record of {cell.name} is of this revision {now[:12]} and lock {lock[:12]}: foreign",
        )
    verdict = verify.verify(cell, binding, Profile.QUALIFYING, head=head, directory=directory, root=root)
    return (*verdict.faults, *verdict.missing)


def other_complaints(heads: Mapping[str, str], root: Path = ROOT) -> tuple[str, ...]:
    """Why the ledgers of the other cells do not carry what the documents say of them: each that has records must end in
    the head that the tag carries, and be what git has seen it grow to.
    """
    said: list[str] = []
    for name in parse((root / CELLS.relative_to(ROOT)).read_text(encoding="utf-8")):
        path = ledger.path_of(name, root / "evidence")
        content = path.read_bytes() if path.is_file() else b""
        records = ledger.decode(content, path.name)
        if name == CELL or not records:
            continue
        if name not in heads:
            said.append(f"the tag carries no line `evidence-head {name}: HASH`")
        elif records[-1].hash != heads[name]:
            said.append(f"{path.name} does not end in the head that the tag carries")
        said += [*verify.rewritten(content, ledger.histories(path, root)), *verify.foreign(records, name)]
    return tuple(said)


def artifact_complaints(version: str, root: Path = ROOT) -> tuple[str, ...]:
    """What is wrong with `dist/`: a file too many, one missing, or a sum that is not the file's."""
    folder = root / "dist"
    have = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    want = set(artifacts(version))
    said = [f"dist/{name} should not be there" for name in sorted(have - want)]
    said += [
        f"dist/{name} is missing (`nox -s package`, `python -m qualify.release --artifacts`)"
        for name in sorted(want - have)
    ]
    if "SHA256SUMS" in have:
        sums = dict(
            line.split("  ")[::-1]
            for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        )
        for name in sorted(have - {"SHA256SUMS"}):
            if sums.get(name) != hashlib.sha256((folder / name).read_bytes()).hexdigest():
                said.append(f"dist/{name} does not have the sum in SHA256SUMS")
    return tuple(said)


def finish_artifacts(root: Path = ROOT) -> None:
    """Add the bill of materials and the sums to what `nox -s package` left in `dist/`."""
    version, folder = project_version(root), root / "dist"
    (folder / f"afd_plugin-{version}.cdx.json").write_text(sbom.bill(version, root), encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def uncommitted(root: Path = ROOT) -> tuple[str, ...]:
    """What the tag does not have of evidence and generated text: these are no part of the revision, and are judged as
    they lie here.
    """
    places = (revision.EVIDENCE, *revision.GENERATED_FILES, *revision.GENERATED_REGIONS)
    lines = capture(["git", "status", "--porcelain", "--", *places], cwd=root).stdout.splitlines()
    names = ", ".join(line[3:] for line in lines)
    return (f"not committed, so not in the tag: {names}; commit it and make the tag anew",) if lines else ()


def check(tag: str, root: Path = ROOT) -> tuple[str, ...]:
    """Every reason why a tag cannot be released; empty when it can."""
    cell, version = load(CELL, root / "containers" / "cells.toml"), project_version(root)
    said = [*(f"dirty tree: {path}" for path in revision.dirty(root)), *uncommitted(root)]
    tag_said, heads = tag_complaints(tag, version, cell.vllm, root)
    said += tag_said
    said += evidence_complaints(cell, heads.get(cell.name), root)
    said += other_complaints(heads, root)
    said += [str(finding) for finding in docs.stale(root)]
    page = (root / docs.SUPPORT).read_text(encoding="utf-8") if (root / docs.SUPPORT).is_file() else ""
    if f"Revision `{revision.revision(root)}`" not in page:
        said.append(f"{docs.SUPPORT} is not of this revision (`nox -s docs -- --write`)")
    return (*said, *artifact_complaints(version, root))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the tag can be released, 1 when not; `--artifacts` completes `dist/` and checks nothing."""
    parser = argparse.ArgumentParser(prog="python -m qualify.release", description=__doc__)
    parser.add_argument("tag", nargs="?", help="such as v0.28.0")
    parser.add_argument("--artifacts", action="store_true", help="write the bill of materials and the sums")
    chosen = parser.parse_args(arguments)
    if chosen.artifacts:
        finish_artifacts()
        return 0
    if chosen.tag is None:
        parser.error("which tag?")
    try:
        faults = check(chosen.tag)
    except (CommandError, ledger.LedgerError) as error:
        faults = (str(error),)
    if faults:
        print(
            f"{chosen.tag} cannot be released:", *(f"  {line}" for line in faults), sep="\n", file=sys.stderr
        )
        return 1
    print(f"{chosen.tag} can be released. Nothing was pushed; this does it:\n  git push origin {chosen.tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
