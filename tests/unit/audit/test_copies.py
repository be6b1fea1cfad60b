# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from qualify.audit import copies
from qualify.audit.__main__ import Audit
from qualify.audit.sources import Package
from qualify.audit.upstream import Upstream
from tests.unit.audit import tree

RENAMED = """
    def shares(amount: int, pieces: int, start: int = 7) -> list[tuple[int, int]]:
        '''Ours, or so it says.'''
        sizes = [amount // pieces] * pieces  # a comment
        for i in range(amount % pieces):
            sizes[i] += 2
        bounds = [start]
        for size in sizes:
            bounds.append(bounds[-1] + size)
        {extra}
        return list(zip(bounds, bounds[1:]))
    """
OWN = """
    def shares(amount: int, pieces: int) -> list[tuple[int, int]]:
        whole, left = divmod(amount, pieces)
        sizes = [whole + (index < left) for index in range(pieces)]
        starts = [sum(sizes[:index]) for index in range(pieces)]
        pairs = list(zip(starts, sizes, strict=True))
        assert len(pairs) == pieces
        return [(start, start + size) for start, size in pairs]
    """


@pytest.mark.parametrize("extra", ["", "print(bounds)"])
def test_a_renamed_copy_is_caught_whole_or_in_part(audited: Callable[..., Audit], extra: str) -> None:
    audit = audited(extra=dedent(RENAMED).replace("{extra}", extra))
    [finding] = [f for f in audit.findings if f.rule == "copy"]
    assert finding.path == "plug/extra.py"
    assert "shares" in finding.message
    assert "vllm/arithmetic.py" in finding.message
    assert audit.report()["copied_functions"] == 1


def test_the_same_purpose_written_anew_is_no_copy(audited: Callable[..., Audit]) -> None:
    assert audited(extra=OWN).report()["copied_functions"] == 0


def test_plain_assignments_and_guards_in_a_row_are_no_copy() -> None:
    source = """
        def __init__(self, a, b, c, d, e, f):
            self.a = a
            self.b = b
            self.c = c
            self.d = d
            self.e = e
            if self.f is not None:
                self.f.close()
                self.f = None
        """
    [body] = copies.bodies("x.py", ast.parse(dedent(source)))
    assert not copies.is_copy(body.statements)


@pytest.mark.vllm
def test_a_renamed_function_of_the_installed_vllm_is_caught(tmp_path: Path) -> None:
    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Name:
            return ast.Name(f"our_{node.id}", node.ctx)

        def visit_arg(self, node: ast.arg) -> ast.arg:
            return ast.arg(f"our_{node.arg}")

    installed = Upstream.installed()
    source = installed.module("vllm.distributed.utils")
    assert source is not None
    [function] = source.names["stateless_init_torch_distributed_process_group"]
    tree.write(
        tmp_path, {"plug/__init__.py": ast.unparse(ast.fix_missing_locations(Rename().visit(function)))}
    )
    [finding] = copies.check(Package(tmp_path, "plug"), installed.root("vllm") / "distributed")
    assert finding.rule == "copy"
