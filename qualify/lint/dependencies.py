# SPDX-License-Identifier: Apache-2.0
"""The dependencies that `pyproject.toml` declares are the distributions that the package imports."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping

from qualify.lint.findings import Finding

# Imported where vLLM runs, and brought by it: the plugin never chooses their versions.
VLLM_AND_ITS_OWN = frozenset(
    {"cuda", "numpy", "opentelemetry", "safetensors", "torch", "transformers", "triton", "uvloop", "vllm"}
)
# where the import and the distribution have different names
DISTRIBUTION_OF = {
    "prometheus_client": "prometheus-client",
    "zmq": "pyzmq",
}


def declared(pyproject: str) -> frozenset[str]:
    """The names in `[project] dependencies`."""
    block = re.search(r"^dependencies = \[(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'"([A-Za-z0-9_.-]+)', block[1] if block else ""))


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each third-party top-level package that a module imports anywhere, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        else:
            continue
        for module in modules:
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "afd_plugin":
                yield top, node.lineno


def dependencies(pyproject: str, trees: Mapping[str, ast.AST]) -> Iterator[Finding]:
    """An import without a declaration, or a declaration that nothing imports; `trees` by path."""
    names = declared(pyproject)
    used: set[str] = set()
    for path, tree in trees.items():
        for top, line in imported(tree):
            name = DISTRIBUTION_OF.get(top, top)
            used.add(name)
            if name not in names | VLLM_AND_ITS_OWN:
                yield Finding(path, line, "dependency", f"imports {top}, not declared in pyproject.toml")
    for name in sorted(names - used):
        yield Finding("pyproject.toml", 1, "dependency", f"declares {name}, which nothing imports")
