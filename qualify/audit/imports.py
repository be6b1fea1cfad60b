# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM, and every private name of torch, that our files import or spell out in a string."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from qualify.audit.sources import Package, SourceFile
from qualify.audit.symbols import How, Symbol, Use, belongs, is_private
from qualify.audit.upstream import Upstream, absolute, dotted_name
from qualify.lint.findings import Finding

_CLASS_PATH = re.compile(r"vllm(\.[A-Za-z_]\w*)+([.:][A-Za-z_]\w*)*")
_WATCHED = ("vllm", "torch")
REGISTRY = "afd_plugin.seams."


def uses(package: Package, upstream: Upstream) -> Iterator[Use | Finding]:
    """All uses, and a finding for each name that the installed sources do not offer."""
    for source in package:
        yield from _of_file(source, upstream)


def _of_file(source: SourceFile, upstream: Upstream) -> Iterator[Use | Finding]:
    texts = _docstrings(source.module.tree)
    registry = f"{source.module.name}.".startswith(REGISTRY)  # it names symbols and uses none
    inner = {id(n.value) for n in ast.walk(source.module.tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(source.module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _named(source, node.lineno, alias.name, upstream, How.IMPORT)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(source.module, node)
            for alias in node.names:
                if alias.name == "*" and belongs(module, "vllm"):
                    yield Finding(
                        source.path, node.lineno, "import", f"imports everything from {module}: name it"
                    )
                else:
                    yield from _named(source, node.lineno, f"{module}.{alias.name}", upstream, How.IMPORT)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            yield from _chain(source, node, upstream)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in texts
            and not registry
            and _CLASS_PATH.fullmatch(node.value)
        ):
            dotted = node.value.replace(":", ".")
            yield from _named(source, node.lineno, dotted, upstream, How.STRING)


def _named(
    source: SourceFile, line: int, dotted: str, upstream: Upstream, how: How
) -> Iterator[Use | Finding]:
    if dotted.split(".", 1)[0] not in _WATCHED:
        return
    symbol = upstream.resolve_dotted(dotted)
    if symbol is None:
        # torch builds part of its names in C; only what says that it is private concerns us there
        if how is How.STRING:
            yield Use(_group(dotted, upstream) or Symbol(dotted), how, source.path, line)
        elif belongs(dotted, "torch") and is_private(dotted):
            yield Use(Symbol(*dotted.rpartition(".")[::2]), how, source.path, line)
        elif belongs(dotted, "vllm"):
            yield Finding(
                source.path,
                line,
                "import",
                f"{dotted} does not exist in the installed vLLM: find where it went and register that",
            )
        return
    required = symbol.upstream or is_private(dotted)
    if symbol != Symbol("torch") and symbol != Symbol("vllm"):
        yield Use(symbol, how, source.path, line, required)


def _group(text: str, upstream: Upstream) -> Symbol | None:
    """The constant in `vllm.plugins` that holds the name of an entry-point group."""
    module = upstream.module("vllm.plugins")
    for name, statements in module.names.items() if module else ():
        for statement in statements:
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Constant) and value.value == text:
                return Symbol("vllm.plugins", name)
    return None


def _chain(source: SourceFile, node: ast.Attribute, upstream: Upstream) -> Iterator[Use | Finding]:
    """Attributes read from an imported module: `vllm.__version__`, `torch._C.x`."""
    dotted = dotted_name(node)
    first, _, rest = dotted.partition(".")
    target = source.imported.get(first, "")
    if not rest or target.split(".", 1)[0] not in _WATCHED:
        return
    parts = rest.split(".")
    for count in range(len(parts), 0, -1):
        full = ".".join([target, *parts[:count]])
        symbol = upstream.resolve_dotted(full)
        if symbol is None:
            continue
        if symbol.qualname and (symbol.upstream or is_private(full)):
            yield Use(symbol, How.READ, source.path, node.lineno)
        return
    module = upstream.resolve_dotted(target)
    if module is not None and not module.qualname and is_private(rest) and belongs(target, "torch"):
        yield Use(Symbol(module.module, rest), How.READ, source.path, node.lineno)


def _docstrings(tree: ast.Module) -> set[int]:
    return {
        id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    }
