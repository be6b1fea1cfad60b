# SPDX-License-Identifier: Apache-2.0
"""Two small vLLM trees, the second with one planted change of each kind, and a project that uses them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from textwrap import dedent

from qualify.upgrade.trees import Identity, Tree

OLD = {
    "vllm/__init__.py": "from vllm.version import __version__\n",
    "vllm/_version.py": "__version__ = version = '0.26.0'\n__commit_id__ = commit_id = 'gffd46bfab'\n",
    "vllm/version.py": "__version__ = '0.26.0'\n",
    "vllm/config/__init__.py": "from vllm.config.parallel import *\n",
    "vllm/config/parallel.py": """
        class ParallelConfig:
            size: int = 1
            kv_scales: bool = False
        """,
    "vllm/v1/__init__.py": "",
    "vllm/v1/engine.py": """
        class Core:
            def __init__(self, config):
                self.config = config
                self.scheduler = make(config)

            def run(self):
                while self.scheduler.has_work():
                    self.step()

            def shutdown(self):
                self.scheduler.close()
        """,
    "vllm/v1/worker.py": """
        def total(values, start=0):
            count = start
            for value in values:
                count += value
            return count

        class Runner:
            def prepare(self, batch):
                return batch.indices, batch.metadata

            def build(self, tokens, logits, spec=False):
                return self.prepare(tokens)

            def forward(self, hidden):
                logger.info("forward")
                return self.model(hidden)

            def choose(self, tokens):
                return tokens

            def load(self):
                self.model = fetch(self.config)
                announce(self.model)

            def warm_up(self):
                self.capture()

            def execute(self, batch):
                return self.choose(tokens=batch)

            def steady(self):
                return self.forward(self.hidden)

        class Executor:
            def initialize(self):
                self.collective_rpc("warm_up")
        """,
    "vllm/model.py": """
        from vllm.layers.moe import Factory

        class Block:
            def __init__(self, config):
                self.experts = Factory(config)
                self.gate = config.gate

            def forward(self, hidden):
                if self.experts.is_internal_router:
                    return self.experts(hidden, hidden)
                return self.experts(hidden, self.gate(hidden))
        """,
    "vllm/layers/__init__.py": "",
    "vllm/layers/moe.py": """
        def Factory(config, router=None, shared=None):
            runner = Runner(config)
            runner.router = router
            runner.shared = shared
            for name in config.names:
                runner.register(name, config.shape(name))
            return runner

        class Runner:
            def __init__(self, config):
                self.config = config

            @property
            def is_internal_router(self):
                return self.gate is not None

            def leave(self):
                return self.config
        """,
    "vllm/helpers.py": """
        def spread(total, parts, offset=0):
            counts = [total // parts] * parts
            for index in range(total % parts):
                counts[index] += 1
            edges = [offset]
            for count in counts:
                edges.append(edges[-1] + count)
            return list(zip(edges, edges[1:]))

        def vanish():
            return 1
        """,
}

NEW = OLD | {
    "vllm/_version.py": "__version__ = version = '0.28.0'\n__commit_id__ = commit_id = 'g2cf0a6915'\n",
    "vllm/version.py": "__version__ = '0.28.0'\n",
    "vllm/v1/engine.py": """
        class Core:
            def __init__(self, config):
                self.config = config
                self.scheduler = make(config)
                self.weight_version = "default"

            @tolerant
            def run(self):
                while self.scheduler.has_work():
                    self.publish(self.scheduler.get_counts())
                    self.step()

            def shutdown(self):
                # a comment changes nothing
                self.scheduler.close()

            def version(self):
                return self.weight_version
        """,
    "vllm/v1/worker.py": """
        def total(values, start=0, *, strict=False):
            count = start
            for value in values:
                count += value
            return count

        class Runner:
            def prepare(self, batch):
                return batch.indices, batch.metadata, batch.longest

            def build(self, tokens, logits, longest=None, spec=False):
                return self.prepare(tokens)

            def forward(self, hidden):
                logger.info("forward of %s", hidden)
                return self.model(hidden)

            def choose(self, tokens):
                return tokens

            def load(self):
                self.model = fetch(self.config)

            def warm_up(self):
                self.capture()
                synchronize()

            def execute(self, batch):
                return self.choose(tokens=batch, allow=self.allow(batch))

            def steady(self):
                return self.forward(self.hidden)

        class Executor:
            def initialize(self):
                self.allocate()

            def warm_up(self):
                self.collective_rpc("warm_up")
        """,
    "vllm/model.py": """
        from vllm.layers.moe import RunnerFactory

        class Block:
            def __init__(self, config):
                self.experts = RunnerFactory(config)
                self.gate = config.gate

            def forward(self, hidden):
                return self.experts(hidden, hidden)
        """,
    "vllm/layers/moe.py": """
        def RunnerFactory(config, router=None, shared=None):
            runner = Runner(config)
            runner.router = router
            runner.shared = shared
            for name in config.names:
                runner.register(name, config.shape(name))
            return runner

        class Runner:
            def __init__(self, config):
                self.config = config

            def leave(self):
                return self.config
        """,
    "vllm/arithmetic.py": OLD["vllm/helpers.py"].split("def vanish")[0],
}
del NEW["vllm/helpers.py"]

PROJECT = {
    "pyproject.toml": """
        [project]
        name = "plug"
        version = "0.28.0"
        [project.scripts]
        plug = "plug.cli:main"
        """,
    "README.md": "# Plug\n\nIt serves exactly one model.\n\n```\nnever counted\n```\n",
    "plug/__init__.py": "",
    "plug/errors.py": """
        class PlugError(Exception):
            pass

        class ShapeRefused(PlugError):
            pass
        """,
    "plug/runner.py": """
        import enum

        from vllm.v1.worker import Runner

        class Role(enum.Enum):
            ATTENTION = "attention"
            FFN = "ffn"

        LISTEN = "AFD_LISTEN"

        class OurRunner(Runner):
            def choose(self, tokens):
                return tokens
        """,
}


def write(root: Path, files: dict[str, str]) -> Path:
    """Write dedented `files` below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
    return root


def tree(root: Path, files: dict[str, str], version: str, commit: str) -> Tree:
    """A tree as a wheel of it would say."""
    write(root, files)
    name = f"vllm-{version}-py3-none-any.whl"
    identity = Identity("wheel", name, version, commit, version.replace(".", "") * 16, {"torch": "==2.13.0"})
    return Tree(root, identity)


def wheel(folder: Path, files: dict[str, str], version: str) -> Path:
    """The same as a real wheel."""
    path = folder / f"vllm-{version}-py3-none-any.whl"
    metadata = f"Name: vllm\nVersion: {version}\nRequires-Python: >=3.10\nRequires-Dist: torch==2.13.0\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, dedent(text))
        archive.writestr(f"vllm-{version}.dist-info/METADATA", metadata)
    return path
