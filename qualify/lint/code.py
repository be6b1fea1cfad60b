# SPDX-License-Identifier: Apache-2.0
"""Rules over the syntax tree of Python files."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from qualify.lint.findings import Finding

# package prefix -> what a module below it may not import, beyond what import-linter's contracts can say
FORBIDDEN_IMPORTS = {
    "afd_plugin/connectors/": ("vllm.v1", "vllm.model_executor", "vllm.entrypoints"),
}
_WAITS = {"join", "wait", "communicate"}
_RUNS = {"run", "call", "check_call", "check_output"}


def _name(node: ast.expr) -> str:
    """`a.b.c` for a chain of attributes on a name, else the last attribute alone."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _name(node.value)
        return f"{owner}.{node.attr}" if owner else node.attr
    return ""


def probing(path: str, tree: ast.AST) -> Iterator[Finding]:
    """No `hasattr` and no `getattr` with a default: on pinned dependencies a missing attribute must fail."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) > 2):
            yield Finding(path, node.lineno, "probing", f"{node.func.id} hides a missing attribute: read it")


def swallowing(path: str, tree: ast.AST) -> Iterator[Finding]:
    """No handler catches everything and does nothing."""
    broad = {"Exception", "BaseException", "builtins.Exception", "builtins.BaseException"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or _name(kind) in broad for kind in caught) and _idle(node.body):
                yield Finding(path, node.lineno, "swallowing", "catches every error and does nothing with it")
        elif (
            isinstance(node, ast.Call)
            and _name(node.func).endswith("suppress")
            and any(_name(kind) in broad for kind in node.args)
        ):
            yield Finding(path, node.lineno, "swallowing", "suppresses every error")


def _idle(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(statement, (ast.Pass, ast.Continue))
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in body
    )


def waiting(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Every wait has a bound: `.join()`, `.wait()`, `.communicate()` and `subprocess.run` are given one."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        keywords = {keyword.arg for keyword in node.keywords}
        open_ended = None in keywords  # **options may hold the bound
        if node.func.attr in _WAITS and not node.args and not keywords:
            yield Finding(path, node.lineno, "waiting", f".{node.func.attr}() waits without a bound")
        owner = _name(node.func.value)
        if owner == "subprocess" and node.func.attr in _RUNS and "timeout" not in keywords and not open_ended:
            yield Finding(path, node.lineno, "waiting", f"subprocess.{node.func.attr} has no timeout")


def sleeping(path: str, tree: ast.AST) -> Iterator[Finding]:
    """A test waits for what it needs, never for time to pass. A pause inside a `while` that polls is fine."""
    polls = [node for node in ast.walk(tree) if isinstance(node, ast.While)]
    excused = {id(inner) for poll in polls for statement in poll.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in excused or not isinstance(node, ast.Call):
            continue
        if _name(node.func) in {"time.sleep", "sleep", "asyncio.sleep"}:
            yield Finding(path, node.lineno, "sleeping", "sleeps: wait for the event itself, with a bound")


def importing(path: str, tree: ast.AST) -> Iterator[Finding]:
    """What `FORBIDDEN_IMPORTS` says of this file's folder."""
    banned = [
        name for prefix, names in FORBIDDEN_IMPORTS.items() if path.startswith(prefix) for name in names
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        hit = next((b for b in banned for m in modules if m == b or m.startswith(b + ".")), None)
        if hit:
            yield Finding(path, node.lineno, "importing", f"imports {hit}, which is above its layer")
