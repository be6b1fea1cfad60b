# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from afd_plugin.seams import REGISTRY
from afd_plugin.seams.schema import Registry, Seam
from qualify.audit import drift, record
from qualify.audit.symbols import Symbol
from qualify.audit.upstream import Upstream
from tests.unit.audit import tree


def drifted(root: Path, registry: Registry, file: str, old: str, new: str) -> list[str]:
    """The findings after one replacement in the stand-in."""
    path = root / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    changed = Upstream({"vllm": root / "vllm", "torch": root / "torch"})
    return [finding.message for finding in drift.check(registry, changed)]


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return tree.registry(tree.upstream(tmp_path))


def test_an_unchanged_tree_has_no_drift(tmp_path: Path, registry: Registry) -> None:
    assert list(drift.check(registry, tree.upstream(tmp_path))) == []


@pytest.mark.parametrize(
    ("old", "new"), [("# the comment", "# another"), ("'''A worker.'''", "'''Works.'''")]
)
def test_comments_and_docstrings_are_no_drift(tmp_path: Path, registry: Registry, old: str, new: str) -> None:
    assert drifted(tmp_path, registry, "vllm/worker.py", old, new) == []


def test_one_changed_token_in_a_body_names_the_seams_that_hold_it(tmp_path: Path, registry: Registry) -> None:
    messages = drifted(tmp_path, registry, "vllm/worker.py", "size + self.rank", "size - self.rank")
    assert [m.split(":")[0] for m in messages] == ["worker", "worker-init-device"]
    assert all("--record" in m for m in messages)


def test_a_changed_signature_is_told_apart_from_a_changed_body(tmp_path: Path, registry: Registry) -> None:
    messages = drifted(
        tmp_path, registry, "vllm/worker.py", "init_device(self)", "init_device(self, again=1)"
    )
    assert any(m.startswith("worker-init-device: the signature") and "again=1" in m for m in messages)


def test_a_removed_symbol_is_drift(tmp_path: Path, registry: Registry) -> None:
    messages = drifted(tmp_path, registry, "vllm/worker.py", "def init_device", "def start_device")
    assert any("Worker.init_device is not defined" in m for m in messages)


def test_a_plain_name_drifts_with_its_own_definition_only(tmp_path: Path, registry: Registry) -> None:
    file = "vllm/config/parallel.py"
    assert drifted(tmp_path, registry, file, "enable_dbo: bool = False", "enable_dbo: bool = True") == []
    [message] = drifted(
        tmp_path, registry, file, "tensor_parallel_size: int = 1", "tensor_parallel_size: int = 2"
    )
    assert message.startswith("config-fields: ")


def test_record_prints_what_makes_a_drifted_entry_true_again(tmp_path: Path, registry: Registry) -> None:
    drifted(tmp_path, registry, "vllm/worker.py", "size + self.rank", "size - self.rank")
    changed = Upstream({"vllm": tmp_path / "vllm", "torch": tmp_path / "torch"})
    printed = record.record(registry, "worker-init-device", changed)
    found = drift.seam_record(Symbol.parse("vllm.worker:Worker.init_device"), changed)
    assert found is not None
    assert f"sha256={found[1]!r}" in printed


def token_faults(text: str, first: int, last: int) -> Iterator[str]:
    """`text` with one name or number between two lines changed; the first one that still parses."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        keyword = token.string in {"def", "class", "self", "async"}
        if first <= token.start[0] <= last and token.type == tokenize.NAME and not keyword:
            lines = text.splitlines(keepends=True)
            row, column = token.start
            line = lines[row - 1]
            lines[row - 1] = line[:column] + token.string + "_x" + line[column + len(token.string) :]
            changed = "".join(lines)
            try:
                ast.parse(changed)
            except SyntaxError:
                continue
            yield changed


@pytest.mark.vllm
@pytest.mark.parametrize(
    "seam", [s for s in REGISTRY.seams if Symbol.parse(s.symbol).qualname], ids=lambda s: s.id
)
def test_every_seam_notices_one_changed_token_of_its_upstream_source(seam: Seam, tmp_path: Path) -> None:
    installed = Upstream.installed()
    symbol = Symbol.parse(seam.symbol)
    source = installed.module(symbol.module)
    assert source is not None
    text = source.path.read_text(encoding="utf-8")
    node = installed.definition(symbol)[-1]
    changed = next(token_faults(text, vars(node)["lineno"], vars(node)["end_lineno"]))
    package = symbol.module.split(".")[0]
    target = tmp_path / source.path.relative_to(installed.root(package).parent)
    target.parent.mkdir(parents=True)
    target.write_text(text, encoding="utf-8")
    only = Registry(seams=(seam,))
    assert list(drift.check(only, Upstream({package: tmp_path / package}))) == []
    target.write_text(changed, encoding="utf-8")
    findings = list(drift.check(only, Upstream({package: tmp_path / package})))
    assert findings
    assert all(f.message.startswith(f"{seam.id}: ") for f in findings)
