# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from qualify.audit.__main__ import Audit

HEAD = "import sys\nimport types\nimport vllm.worker\nfrom vllm import registry\nfrom vllm.worker import Worker\n\n"


@pytest.mark.parametrize(
    "source",
    [
        "Worker.load_model = print\n",
        "vllm.worker.Worker = int\n",
        "vllm.worker.Worker.load_model = print\n",
        "registry.register_loader = print\n",
        "setattr(Worker, 'load_model', print)\n",
        "delattr(vllm.worker, 'Worker')\n",
        "type.__setattr__(Worker, 'load_model', print)\n",
        "Worker.__dict__['load_model'] = print\n",
        "vars(vllm.worker)['Worker'] = int\n",
        "sys.modules['vllm.worker'] = types.ModuleType('x')\n",
        "vllm.worker.__dict__.update(Worker=int)\n",
        "del Worker.load_model\n",
        "for Worker.load_model in (print,):\n    pass\n",
        "import unittest.mock\nunittest.mock.patch('vllm.worker.Worker')\n",
        "from unittest import mock\nmock.patch.object(Worker, 'load_model')\n",
        "def f(w: Worker) -> None:\n    w.load_model = print\n",
        "def f(w: Worker) -> None:\n    w.load_model = types.MethodType(print, w)\n",
        "def f(w: Worker) -> None:\n    setattr(w, 'load_model', print)\n",
        "def f(w: Worker) -> None:\n    type(w).load_model = print\n",
        "def f(w: Worker) -> None:\n    w.__class__ = int\n",
        "def f(w: Worker) -> None:\n    w.__class__.load_model = print\n",
        "def f(k: type[Worker]) -> None:\n    k.load_model = print\n",
    ],
)
def test_a_patch_is_counted(audited: Callable[..., Audit], source: str) -> None:
    audit = audited(extra=HEAD + source)
    assert any(f.path == "plug/extra.py" and f.rule == "patch" for f in audit.findings)
    assert audit.report()["patch_count"] != 0


@pytest.mark.parametrize(
    "source",
    ["registry.loaders['x'] = int\n", "registry.loaders.pop('x')\n", "del registry.loaders['x']\n"],
)
def test_changing_a_vllm_registry_needs_an_entry_that_says_so(
    audited: Callable[..., Audit], source: str
) -> None:
    audit = audited(extra=HEAD + source)
    assert any("changes vllm.registry:loaders" in f.message for f in audit.findings)
    assert audit.report()["patch_count"] == 0
