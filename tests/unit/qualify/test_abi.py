# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from qualify import abi, csrc
from qualify.abi import Library, complaints, defined_operators, glibc, read

GOOD = Library(
    name="_C.abi3.so",
    needed=frozenset({"libtorch_cpu.so", "libc10.so", "libc.so.6", "libstdc++.so.6"}),
    run_paths=(),
    undefined=frozenset(
        {"aoti_torch_get_dtype", "PyModule_Create2", "_ZNSt7__cxx1112basic_stringIcE4dataEv"}
    ),
    defined=frozenset({"PyInit__C"}),
    versions=frozenset({"GLIBC_2.2.5", "GLIBC_2.34", "GLIBCXX_3.4.21"}),
    cubins=frozenset({80, 90, 100}),
    ptx=frozenset({100}),
)


def test_a_library_as_declared_is_accepted() -> None:
    assert complaints(GOOD, csrc.ARCHITECTURES, new_abi=True) == ()


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (replace(GOOD, name="_C.cpython-311.so"), "does not carry the abi3 tag"),
        (
            replace(GOOD, needed=GOOD.needed | {"libcudart.so.13"}),
            "needs libcudart.so.13, which is not on the list",
        ),
        (replace(GOOD, run_paths=("/opt/lib",)), "has the run path /opt/lib"),
        (
            replace(GOOD, undefined=GOOD.undefined | {"_ZN3c104cuda20CUDACachingAllocator9allocatorE"}),
            "no part of",
        ),
        (
            replace(GOOD, undefined=GOOD.undefined | {"_ZNK2at10TensorBase4sizeEl"}),
            "no part of libtorch's stable",
        ),
        (replace(GOOD, undefined=GOOD.undefined | {"_ZTIN3c105ErrorE"}), "no part of libtorch's stable"),
        (replace(GOOD, undefined=GOOD.undefined | {"_ZNSs4sizeEv"}), "uses the old C++ ABI (`_ZNSs4sizeEv`)"),
        (
            replace(GOOD, undefined=frozenset({"PyModule_Create2"})),
            "no symbol of libtorch's stable ABI at all",
        ),
        (
            replace(GOOD, versions=GOOD.versions | {"GLIBC_2.38"}),
            "needs glibc 2.38, the declared platform is",
        ),
        (replace(GOOD, versions=frozenset({"GLIBC_2.28"})), "declare manylinux_2_28"),
        (replace(GOOD, cubins=frozenset({80, 100})), "has no machine code for sm_90"),
        (replace(GOOD, cubins=GOOD.cubins | {120}), "has machine code for sm_120, which is not declared"),
        (replace(GOOD, ptx=frozenset()), "has no PTX for compute_100"),
    ],
)
def test_each_planted_fault_is_found(planted: Library, said: str) -> None:
    found = complaints(planted, csrc.ARCHITECTURES, new_abi=True)
    assert len(found) == 1, found
    assert said in found[0]


def test_the_new_abi_does_not_fit_a_torch_with_the_old_one() -> None:
    assert complaints(GOOD, csrc.ARCHITECTURES, new_abi=False) == ("uses the new C++ ABI, torch the old one",)


def test_the_newest_glibc_decides() -> None:
    assert glibc({"GLIBC_2.2.5", "GLIBC_2.17", "GLIBC_2.9", "GLIBCXX_3.4.30"}) == (2, 17)
    assert glibc(set()) == (2, 0)


def test_a_real_shared_object_is_read() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    found = read(Path(spec.origin).with_name("spinloop.abi3.so"))
    assert "libc.so.6" in found.needed
    assert any(name.startswith("Py") for name in found.undefined)
    assert any(name.startswith("PyInit_") for name in found.defined)
    assert glibc(found.versions) > (2, 0)
    assert "has no machine code for sm_80" in " ".join(complaints(found, csrc.ARCHITECTURES, new_abi=True))


def test_the_operators_are_those_that_the_source_defines() -> None:
    source = (csrc.ROOT / "csrc" / "ops.cpp").read_text(encoding="utf-8")
    names = [schema.partition("(")[0] for schema in defined_operators(source)]
    assert "push" in names
    assert len(names) == source.count("library.def(")
    assert defined_operators('m.def("a(int x) "\n  "-> ()"); m.def(NAME);') == ("a(int x) -> ()",)


def test_without_the_sources_of_the_extension_it_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(csrc, "ROOT", tmp_path)
    assert abi.main([]) == 1
    assert "abi: csrc/exchange.cu, csrc/ops.cpp, csrc/exchange.h: none is there" in capsys.readouterr().err


def test_without_a_compiler_it_is_blocked_and_a_broken_library_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> Path:
        raise csrc.BuildError("No nvcc with its toolkit was found")

    monkeypatch.setattr(csrc, "build", missing)
    assert abi.main([]) == 3
    assert "BLOCKED: No nvcc" in capsys.readouterr().err
    monkeypatch.setattr(abi, "judge", lambda path, new_abi: ("needs libx.so",))
    assert abi.main(["--library", str(tmp_path / "x.abi3.so")]) == 1
    assert "abi: needs libx.so" in capsys.readouterr().err
