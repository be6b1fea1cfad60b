# SPDX-License-Identifier: Apache-2.0
"""The release workflow, what needs no runner: its steps' own commands, run in clones that are as a runner has them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from qualify.cells import ROOT

TAG = "v0.28.0"
MESSAGE = "release\n\nevidence-head cpu: 00\n"


def _job(name: str) -> list[dict[str, Any]]:
    """The steps of a job of the release."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    steps: list[dict[str, Any]] = yaml.safe_load(text)["jobs"][name]["steps"]
    return steps


def _command(name: str) -> str:
    """The command of a named step of the build."""
    return str(next(step["run"] for step in _job("build") if step.get("name") == name))


def _git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(
        ["git", *who, *words], cwd=root, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone of a repository with an annotated tag, which the clone has as `actions/checkout` leaves it."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    _git(tmp_path, "init", "-q", str(origin))
    _git(origin, "commit", "-q", "--allow-empty", "-m", "state")
    _git(origin, "tag", "-a", TAG, "-m", MESSAGE)
    _git(tmp_path, "clone", "-q", str(origin), str(clone))
    _git(clone, "update-ref", f"refs/tags/{TAG}", f"{TAG}^{{commit}}")
    assert _git(clone, "cat-file", "-t", TAG) == "commit"
    return clone


def _run(command: str, clone: Path) -> None:
    variables = os.environ | {"TAG": TAG, "NOTES": str(clone.parent / "notes.md")}
    subprocess.run(["bash", "-euc", command], cwd=clone, env=variables, check=True, timeout=60)


def test_the_tag_is_judged_and_its_message_kept_as_it_was_pushed(checkout: Path) -> None:
    """`release_check` refuses a tag without a message, and the heads are in it."""
    _run(_command("The tag as it was pushed"), checkout)
    assert _git(checkout, "cat-file", "-t", TAG) == "tag"
    _run(_command("The tag's message"), checkout)
    assert (checkout.parent / "notes.md").read_text(encoding="utf-8").strip() == MESSAGE.strip()


def test_the_tag_is_fetched_before_it_is_judged() -> None:
    """In this order, whatever lies between."""
    names = [step.get("name", "") for step in _job("build")]
    assert names.index("The tag as it was pushed") < names.index("The tag may be released")


def test_a_release_is_made_of_artifacts_alone() -> None:
    """Its job has no checkout, so its notes come as a file: from an artifact that the build left."""
    publish = _job("publish")
    assert not any("checkout" in step.get("uses", "") for step in publish)
    left, taken = (
        {step["with"]["name"] for step in steps if f"{action}-artifact" in step.get("uses", "")}
        for steps, action in ((_job("build"), "upload"), (publish, "download"))
    )
    assert left == taken == {"dist", "notes"}
    release = next(step["run"] for step in publish if "gh release create" in step.get("run", ""))
    assert "--notes-from-tag" not in release
    assert "--notes-file notes/notes.md" in release


@pytest.mark.parametrize("job", ["build", "publish"])
def test_what_the_tags_author_chose_reaches_a_shell_as_a_variable_only(job: str) -> None:
    """A tag's name may hold what a shell would run."""
    assert not [step["run"] for step in _job(job) if "${{" in step.get("run", "")]
