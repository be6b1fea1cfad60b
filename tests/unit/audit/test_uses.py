# SPDX-License-Identifier: Apache-2.0
"""One planted use of the stand-in at a time: the audit names it, and is silent without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from afd_plugin.seams import REGISTRY
from afd_plugin.seams.schema import Registry, SeamKind
from qualify.audit import drift, references
from qualify.audit.__main__ import ROOT, Audit, summary
from qualify.audit.coverage import Coverage
from qualify.audit.upstream import Upstream
from tests.unit.audit import tree

Audited = Callable[..., Audit]


def lines(audit: Audit, rule: str) -> list[str]:
    return [f"{f.path}:{f.line} {f.message}" for f in audit.findings if f.rule == rule]


def test_a_package_that_uses_exactly_what_is_registered_passes(audited: Audited) -> None:
    audit = audited()
    assert audit.findings == []
    assert list(summary(audit)) == [
        "2 seams, 3 plain names in 3 surfaces, patch count 0, copied functions 0, findings 0"
    ]


@pytest.mark.parametrize(
    ("source", "symbol"),
    [
        ("from vllm.worker import WorkerBase\n", "imports vllm.worker:WorkerBase"),
        ("def f() -> None:\n    from vllm.registry import loaders\n", "imports vllm.registry:loaders"),
        ("import vllm\nprint(vllm.__version__)\n", "reads vllm.version:__version__"),
        ("import vllm.registry as r\nprint(r.loaders)\n", "reads vllm.registry:loaders"),
        ("PATH = 'vllm.worker.WorkerBase'\n", "names in a string vllm.worker:WorkerBase"),
        ("PATH = 'vllm.nowhere'\n", "names in a string vllm.nowhere:"),
        ("GROUP = 'vllm.all_plugins'\n", "names in a string vllm.plugins:GROUP"),
        ("from torch._secret import peek\n", "imports torch._secret:peek"),
    ],
)
def test_an_unregistered_import_or_class_path_is_found(audited: Audited, source: str, symbol: str) -> None:
    found = lines(audited(extra=source), "unregistered")
    assert any(line.startswith("plug/extra.py") and symbol in line for line in found)


def test_an_import_that_the_installed_vllm_does_not_offer_is_found(audited: Audited) -> None:
    assert lines(audited(extra="from vllm.worker import Missing\n"), "import")


CLASS = "from vllm.worker import Worker\n\nclass More(Worker):\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "    def load_model(self, *, dummy: bool = False) -> None: ...\n",
            "overrides vllm.worker:Worker.load_model",
        ),
        ("    def shutdown(self) -> None: ...\n", "overrides vllm.worker:WorkerBase.shutdown"),
        ("    rank = 3\n", "overrides vllm.worker:Worker.rank"),
        ("    def f(self) -> None:\n        self.rank = 3\n", "assigns vllm.worker:Worker.rank"),
        ("    def f(self) -> None:\n        super().load_model()\n", "reads vllm.worker:Worker.load_model"),
    ],
)
def test_an_unregistered_override_or_assignment_is_found(audited: Audited, body: str, expected: str) -> None:
    assert any(expected in line for line in lines(audited(extra=CLASS + body), "unregistered"))


def test_a_mixin_overrides_through_the_class_that_joins_it(audited: Audited) -> None:
    source = (
        "from vllm.worker import Worker\n\nclass Mixin:\n    def shutdown(self) -> None: ...\n\n"
        "class Joined(Mixin, Worker):\n    pass\n"
    )
    found = lines(audited(extra=source), "unregistered")
    assert any(line.startswith("plug/extra.py:4 overrides vllm.worker:WorkerBase.shutdown") for line in found)


@pytest.mark.parametrize(
    ("definition", "fault"),
    [
        ("def init_device(self, more: int) -> int: return 1", "requires `more`"),
        ("async def init_device(self) -> int: return 1", "async"),
        ("@property\n    def init_device(self) -> int: return 1", "decorated"),
        ("def load_model(self) -> None: ...", "does not take `dummy`"),
    ],
)
def test_an_override_that_native_callers_cannot_call_is_found(
    audited: Audited, definition: str, fault: str
) -> None:
    assert any(fault in line for line in lines(audited(extra=f"{CLASS}    {definition}\n"), "override"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(w: Worker) -> bool:\n    return w.parallel_config.enable_dbo\n", "ParallelConfig.enable_dbo"),
        ("def f(w: Worker) -> None:\n    w.load_model()\n", "reads vllm.worker:Worker.load_model"),
        ("def f(w: Worker | None) -> None:\n    if w:\n        w.shutdown()\n", "WorkerBase.shutdown"),
        ("def f(ws: list[Worker]) -> None:\n    [w.shutdown() for w in ws]\n", "WorkerBase.shutdown"),
        ("def f(w: Worker) -> None:\n    w.rank = 1\n", "assigns vllm.worker:Worker.rank"),
        ("def f(w: Worker) -> None:\n    setattr(w, 'rank', 1)\n", "assigns vllm.worker:Worker.rank"),
        ("def f(w: Worker) -> object:\n    return getattr(w, 'extra')\n", "reads vllm.worker:Worker.extra"),
        ("def f(w: Worker) -> None:\n    del w.rank\n", "assigns vllm.worker:Worker.rank"),
    ],
)
def test_an_unregistered_attribute_of_a_typed_object_is_found(
    audited: Audited, source: str, expected: str
) -> None:
    found = lines(audited(extra="from vllm.worker import Worker\n\n" + source), "unregistered")
    assert any(expected in line for line in found)


def test_a_read_from_an_untyped_part_of_a_vllm_object_is_found(audited: Audited) -> None:
    source = "from vllm.worker import Worker\n\ndef f(w: Worker) -> None:\n    print(w.extra.unseen)\n"
    assert any("`.unseen`" in line for line in lines(audited(extra=source), "attribute"))


def test_a_computed_attribute_name_on_a_vllm_object_is_found(audited: Audited) -> None:
    source = (
        "from vllm.worker import Worker\n\ndef f(w: Worker, n: str) -> object:\n    return getattr(w, n)\n"
    )
    assert any("computed name" in line for line in lines(audited(extra=source), "attribute"))


def test_an_entry_that_nothing_uses_is_found(audited: Audited) -> None:
    source = "from vllm.worker import Worker\n\nclass OurWorker(Worker):\n    pass\n"
    stale = lines(audited(worker=source), "stale")
    for entry in ("worker-init-device", "config", "config-fields", "worker-state"):
        assert any(f" {entry}: nothing uses" in line for line in stale)


def test_used_by_must_name_exactly_the_users(audited: Audited) -> None:
    stale = lines(audited(extra=CLASS + "    pass\n"), "stale")
    assert any("worker: used_by says ['plug.worker']" in line and "plug.extra" in line for line in stale)


def test_an_entry_point_needs_no_line_of_ours_but_its_source_is_watched(tmp_path: Path) -> None:
    upstream = tree.upstream(tmp_path)
    entry = tree.seam(upstream, "group", "vllm.plugins:GROUP", SeamKind.ENTRY_POINT)
    assert list(Coverage(Registry((entry,))).findings()) == []
    (tmp_path / "vllm/plugins.py").write_text("GROUP = 'vllm.other_plugins'\n", encoding="utf-8")
    changed = Upstream({"vllm": tmp_path / "vllm", "torch": tmp_path / "torch"})
    assert [f.rule for f in drift.check(Registry((entry,)), changed)] == ["drift"]


def test_the_registry_of_this_project_is_well_formed() -> None:
    assert list(references.check(REGISTRY, ROOT)) == []
