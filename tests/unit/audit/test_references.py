# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from afd_plugin.seams.schema import Registry
from qualify.audit import references
from tests.unit.audit import tree


def faults(root: Path, **changed: object) -> list[str]:
    upstream = tree.upstream(root)
    tree.package(root)
    seams = tree.registry(upstream).seams
    registry = Registry((replace(seams[0], **changed), seams[1]))  # type: ignore[arg-type]
    return [finding.message for finding in references.check(registry, root)]


def test_entries_whose_tests_exist_pass(tmp_path: Path) -> None:
    assert faults(tmp_path) == []


def test_a_test_that_does_not_exist_is_found(tmp_path: Path) -> None:
    for missing in ("tests/none.py", "tests/test_it.py::test_other", "tests/test_it.py::TestIt::test_it"):
        assert faults(tmp_path, native_tests=(missing,)) == [
            f"worker: native_tests names {missing}, which does not exist"
        ]


def test_an_entry_without_tests_or_invariant_is_found(tmp_path: Path) -> None:
    assert faults(tmp_path, afd_tests=()) == ["worker: afd_tests is empty: name a test that would fail"]
    assert "says too little" in faults(tmp_path, invariant="fine")[0]


def test_two_entries_with_one_id_are_found(tmp_path: Path) -> None:
    assert faults(tmp_path, id="worker-init-device") == ["worker-init-device: 2 entries have this id"]
