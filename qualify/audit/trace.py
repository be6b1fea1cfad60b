# SPDX-License-Identifier: Apache-2.0
"""Records, in a running process, every attribute our code takes from a vLLM object.

What the type checker cannot see (an untyped object, a class chosen at run time) a traced run does. Modules of
`afd_plugin` imported after `install` are compiled with each attribute read `a.b` replaced by a probe that reads it and
notes which vLLM class or module it came from; a call of a vLLM method is such a read. Nothing else is slowed down, and
`afd_plugin` holds no code for it. Each new observation is one line of JSON in a file per process, written at once.

Two ways in, both without touching what is traced:

* vLLM's own way: `environment(directory)` returns variables under which every vLLM process (frontend, engine core,
  worker) finds a general plugin that calls `install`. vLLM loads plugins before it imports the worker class.
* `python -m qualify.audit.trace DIRECTORY MODULE [ARGUMENTS]` runs a module traced from its first import. Use it for
  the process that a test starts itself, whose own modules are imported before vLLM loads its plugins.

`python -m qualify.audit --trace DIRECTORY` then demands that the registry names all that was seen.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

VARIABLE = "AFD_AUDIT_TRACE"
PROBE = "__afd_audit_probe__"
_PLUGIN = "afd_audit_trace"
_CHECKOUT = Path(__file__).resolve().parents[2]


def environment(directory: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for a process whose vLLM processes shall be traced into `directory`, on top of `base`.

    Makes the metadata of a throw-away distribution there, whose only content is the entry point; it ends with the
    directory. A caller that sets VLLM_PLUGINS must add `afd_audit_trace` to it.
    """
    variables = dict(os.environ if base is None else base)
    metadata = directory / "plugin" / f"{_PLUGIN}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 0\n", encoding="utf-8"
    )
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{_PLUGIN} = {__name__}:register\n", encoding="utf-8"
    )
    paths = [str(metadata.parent), str(_CHECKOUT), variables.get("PYTHONPATH", "")]
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), VARIABLE: str(directory)}


def register() -> None:
    """The entry point: trace this process when the environment says so."""
    directory = os.environ.get(VARIABLE)
    if directory:
        install(Path(directory))


def install(directory: Path, package: str = "afd_plugin", native: str = "vllm") -> Recorder:
    """Trace the modules of `package` that are imported from now on; does nothing the second time."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder) and finder.package == package:
            return finder.recorder
    recorder = Recorder(directory, native)
    sys.meta_path.insert(0, _Finder(package, recorder))
    return recorder


class Recorder:
    """Writes what the probes see."""

    def __init__(self, directory: Path, native: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"trace-{os.getpid()}.jsonl"
        self._native = native
        self._seen: set[tuple[type, str, str, int]] = set()
        self._lock = threading.Lock()

    def read(self, owner: Any, name: str, file: str, line: int) -> Any:
        """`owner.name`, noted when it came from vLLM."""
        value = getattr(owner, name)
        kind = owner if isinstance(owner, type) else type(owner)
        key = (kind, name, file, line)
        if key not in self._seen or isinstance(owner, ModuleType | super):
            self._seen.add(key)
            self._note(owner, name, file, line)
        return value

    def _note(self, owner: Any, name: str, file: str, line: int) -> None:
        if isinstance(owner, ModuleType):
            origin = [f"{owner.__name__}:"] if self._is_native(owner.__name__) else []
        else:
            origin = [
                f"{c.__module__}:{c.__qualname__}" for c in _classes(owner) if self._is_native(c.__module__)
            ]
        if not origin:
            return
        record = json.dumps({"owners": origin, "name": name, "path": file, "line": line})
        with self._lock, self._path.open("a", encoding="utf-8") as out:
            out.write(record + "\n")

    def _is_native(self, module: str) -> bool:
        return module == self._native or module.startswith(self._native + ".")


def _classes(owner: Any) -> Sequence[type]:
    """The classes in which an attribute of `owner` is looked up, nearest first."""
    if isinstance(owner, super):
        return _after(owner)
    return owner.__mro__ if isinstance(owner, type) else type(owner).__mro__


def _after(view: Any) -> Sequence[type]:
    """The classes that a `super()` object looks into."""
    order: Sequence[type] = view.__self_class__.__mro__ if view.__self_class__ else ()
    return order[order.index(view.__thisclass__) + 1 :]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str, recorder: Recorder) -> None:
        self.package = package
        self.recorder = recorder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.package and not fullname.startswith(self.package + "."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and spec.origin:
            spec.loader = _Loader(fullname, spec.origin, self)
        return spec


class _Loader(SourceFileLoader):
    """Compiles from source, so that no traced code is ever cached."""

    def __init__(self, fullname: str, path: str, finder: _Finder) -> None:
        super().__init__(fullname, path)
        self._finder = finder

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _Probing().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        top = self._finder.package.split(".", 1)[0]
        relative = "/".join([top, *module.__name__.split(".")[1:]])
        file = relative + (
            "/__init__.py" if module.__spec__ and module.__spec__.submodule_search_locations else ".py"
        )
        recorder = self._finder.recorder

        def probe(owner: Any, name: str, line: int) -> Any:
            return recorder.read(owner, name, file, line)

        vars(module)[PROBE] = probe
        super().exec_module(module)


class _Probing(ast.NodeTransformer):
    """Replaces attribute reads by probes, except where Python wants a plain name: annotations and patterns."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        mangled = node.attr.startswith("__") and not node.attr.endswith("__")
        if not isinstance(node.ctx, ast.Load) or mangled:
            return node
        arguments = [node.value, ast.Constant(node.attr), ast.Constant(node.lineno)]
        return ast.copy_location(ast.Call(ast.Name(PROBE, ast.Load()), arguments, []), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.target = self.visit(node.target)
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.defaults = [self.visit(d) for d in node.defaults]
        node.kw_defaults = [self.visit(d) if d else None for d in node.kw_defaults]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return node

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.AST:
        return node

    def visit_MatchClass(self, node: ast.MatchClass) -> ast.AST:
        return node


def main(arguments: Sequence[str]) -> None:
    """Run a module as `python -m` would, traced."""
    directory, module, *rest = arguments
    os.environ.update(environment(Path(directory)))
    install(Path(directory))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
