# SPDX-License-Identifier: Apache-2.0
"""A small stand-in for vLLM, a package of ours that uses it rightly, and a registry that says so."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from afd_plugin.seams.schema import Registry, Seam, SeamKind, Surface
from qualify.audit.drift import seam_record, surface_record
from qualify.audit.sources import Package
from qualify.audit.symbols import Symbol
from qualify.audit.upstream import Upstream

VLLM = {
    "vllm/__init__.py": "from vllm.version import __version__\n",
    "vllm/py.typed": "",
    "vllm/plugins.py": "GROUP = 'vllm.all_plugins'\n",
    "vllm/version.py": "__version__ = '0.28.0'\n",
    "vllm/config/__init__.py": "from vllm.config.parallel import ParallelConfig\n",
    "vllm/config/parallel.py": """
        class ParallelConfig:
            tensor_parallel_size: int = 1
            enable_dbo: bool = False
        """,
    "vllm/registry.py": """
        loaders: dict[str, type] = {}

        def register_loader(name: str):
            '''Register.'''
            def keep(kind: type) -> type:
                loaders[name] = kind
                return kind
            return keep
        """,
    "vllm/worker.py": """
        from typing import Any

        from vllm.config import ParallelConfig

        class WorkerBase:
            def shutdown(self) -> None:
                pass

        class Worker(WorkerBase):
            '''A worker.'''

            def __init__(self, parallel_config: ParallelConfig) -> None:
                self.parallel_config = parallel_config
                self.rank = 0
                self.extra: Any = None

            def init_device(self) -> int:
                # the comment
                size = self.parallel_config.tensor_parallel_size
                return size + self.rank

            def load_model(self, *, dummy: bool = False) -> None:
                print(dummy)

        class FastWorker(Worker):
            def hurry(self) -> None:
                self.rank = 1
        """,
    "vllm/arithmetic.py": """
        def spread(total, parts, offset=0):
            counts = [total // parts] * parts
            for index in range(total % parts):
                counts[index] += 1
            edges = [offset]
            for count in counts:
                edges.append(edges[-1] + count)
            if edges[-1] != offset + total:
                raise ValueError(f"lost {total - edges[-1]}")
            return list(zip(edges, edges[1:]))
        """,
    "torch/__init__.py": "",
    "torch/py.typed": "",
    "torch/_secret.py": "def peek() -> int:\n    return 1\n",
}

OURS = {
    "plug/__init__.py": "",
    "plug/worker.py": """
        from vllm.config import ParallelConfig
        from vllm.worker import Worker

        def ranks(config: ParallelConfig) -> int:
            return config.tensor_parallel_size

        class OurWorker(Worker):
            def init_device(self) -> int:
                return super().init_device() + self.rank
        """,
}

TEST = "tests/test_it.py::test_it"


def write(root: Path, files: dict[str, str]) -> None:
    """Write dedented `files` below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")


def upstream(root: Path) -> Upstream:
    """The stand-in, written below `root`."""
    write(root, VLLM)
    return Upstream({"vllm": root / "vllm", "torch": root / "torch"})


def package(root: Path, **modules: str) -> Package:
    """Our package, with further or changed modules `name="source"`."""
    write(root, OURS | {f"plug/{name}.py": text for name, text in modules.items()})
    write(root, {"tests/test_it.py": "def test_it():\n    pass\n"})
    return Package(root, "plug")


def seam(tree: Upstream, id_: str, symbol: str, kind: SeamKind, *users: str) -> Seam:
    """A true entry for `symbol`."""
    signature, digest = seam_record(Symbol.parse(symbol), tree) or ("", "")
    return Seam(
        id=id_,
        symbol=symbol,
        kind=kind,
        signature=signature,
        sha256=digest,
        invariant="what must stay true about it upstream",
        plan="none",
        used_by=users or ("plug.worker",),
        afd_tests=(TEST,),
        native_tests=(TEST,),
    )


def surface(tree: Upstream, id_: str, owner: str, *names: str) -> Surface:
    """A true entry for plain names of `owner`."""
    digests = {name: surface_record(Symbol.parse(owner).member(name), tree) or "" for name in names}
    return Surface(id_, owner, digests, "read as it stands, for its value", (TEST,))


def registry(tree: Upstream) -> Registry:
    """What `OURS` needs, exactly."""
    return Registry(
        seams=(
            seam(tree, "worker", "vllm.worker:Worker", SeamKind.SUBCLASS),
            seam(tree, "worker-init-device", "vllm.worker:Worker.init_device", SeamKind.OVERRIDE),
        ),
        surfaces=(
            surface(tree, "config", "vllm.config.parallel:", "ParallelConfig"),
            surface(tree, "config-fields", "vllm.config.parallel:ParallelConfig", "tensor_parallel_size"),
            surface(tree, "worker-state", "vllm.worker:Worker", "rank"),
        ),
    )
