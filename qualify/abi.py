# SPDX-License-Identifier: Apache-2.0
"""What the built extension of `csrc/` really needs and holds, judged in the runtime environment.

`python -m qualify.abi` builds it (or takes `--library`) and checks: the abi3 name and symbols (abi3audit), only
libtorch's stable ABI, the C++11 ABI of the installed torch, the libraries it needs, no run path, the platform
tag that its symbol versions show, machine code and PTX for the declared devices, no unresolved symbol, import,
and the operators' schemas. ELF is read with pyelftools, machine code listed with the toolkit's own cuobjdump.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from qualify import csrc
from qualify.process import CommandError, capture

PLATFORM = "manylinux_2_34"
"""The oldest system that a wheel with this library may name: glibc 2.34, for its threads inside libc."""

ALLOWED = frozenset(
    {
        "ld-linux-x86-64.so.2", "libc.so.6", "libc10.so", "libdl.so.2", "libgcc_s.so.1", "libm.so.6",
        "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libtorch_cpu.so",
    }
)  # fmt: skip
_STABLE = re.compile(r"(?:aoti_)?torch_\w+")
_CPLUSPLUS_TORCH = re.compile(
    r"_ZNK?[KVr]*(?:S[a-z]_)?(?:3c10|2at|5torch|3aot|8caffe2)|_ZT[ISV]N(?:3c10|2at|5torch)"
)
_OLD_STRING = re.compile(r"^_ZN?K?Ss|^_Z\w+Ss(?:[A-Z_]|$)|ESs")


@dataclass(frozen=True)
class Library:
    """What the dynamic section, the symbols and the embedded device code of a library say."""

    name: str
    needed: frozenset[str]
    run_paths: tuple[str, ...]
    undefined: frozenset[str]
    defined: frozenset[str]
    versions: frozenset[str]
    cubins: frozenset[int]
    ptx: frozenset[int]


def read(path: Path) -> Library:
    """Read a library's own account of itself."""
    needed: set[str] = set()
    run_paths: list[str] = []
    versions: set[str] = set()
    undefined: set[str] = set()
    defined: set[str] = set()
    with path.open("rb") as handle:
        for section in ELFFile(handle).iter_sections():
            if isinstance(section, DynamicSection):
                for tag in section.iter_tags():
                    # pyelftools names the attribute after the tag
                    if tag.entry.d_tag == "DT_NEEDED":
                        needed.add(str(vars(tag)["needed"]))
                    elif tag.entry.d_tag in ("DT_RUNPATH", "DT_RPATH"):
                        run_paths.append(str(vars(tag)[tag.entry.d_tag.removeprefix("DT_").lower()]))
            elif isinstance(section, GNUVerNeedSection):
                versions |= {aux.name for _, auxiliaries in section.iter_versions() for aux in auxiliaries}
            elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                for symbol in section.iter_symbols():
                    target = undefined if symbol.entry.st_shndx == "SHN_UNDEF" else defined
                    target.add(symbol.name)
    cubins, ptx = device_code(path)
    return Library(
        path.name,
        frozenset(needed),
        tuple(run_paths),
        frozenset(undefined - {""}),
        frozenset(defined),
        frozenset(versions),
        cubins,
        ptx,
    )


def cuobjdump() -> Path:
    """The cuobjdump that triton's wheel carries in every cell; CommandError when there is none."""
    spec = find_spec("triton")
    if spec is not None and spec.origin is not None:
        found = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if found.is_file():
            return found
    raise CommandError("no cuobjdump: this cell's triton carries none")


def device_code(path: Path) -> tuple[frozenset[int], frozenset[int]]:
    """The compute capabilities of the machine code and of the PTX inside a library."""
    listed = capture([cuobjdump(), "-lelf", "-lptx", path], check=False).stdout
    cubins = re.findall(r"^ELF file.*sm_(\d+)a?\.cubin", listed, re.MULTILINE)
    ptx = re.findall(r"^PTX file.*sm_(\d+)a?\.ptx", listed, re.MULTILINE)
    return frozenset(map(int, cubins)), frozenset(map(int, ptx))


def glibc(versions: Iterable[str]) -> tuple[int, int]:
    """The newest glibc that the symbol versions ask for."""
    found = [re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version) for version in versions]
    return max(((int(m[1]), int(m[2])) for m in found if m), default=(2, 0))


def complaints(library: Library, architectures: Sequence[int], *, new_abi: bool) -> tuple[str, ...]:
    """One sentence for each thing about a library that is not as declared."""
    said = []
    if not library.name.endswith(".abi3.so"):
        said.append(f"{library.name} does not carry the abi3 tag")
    said += [f"needs {name}, which is not on the list" for name in sorted(library.needed - ALLOWED)]
    said += [f"has the run path {path}" for path in library.run_paths]
    torch_names = sorted(name for name in library.undefined if _CPLUSPLUS_TORCH.match(name))
    said += [f"uses {name}, which is no part of libtorch's stable ABI" for name in torch_names]
    old = sorted(name for name in library.undefined if _OLD_STRING.search(name))
    if new_abi and old:
        said.append(f"uses the old C++ ABI (`{old[0]}`), torch the new one")
    if not new_abi and any("__cxx11" in name for name in library.undefined):
        said.append("uses the new C++ ABI, torch the old one")
    if not any(_STABLE.fullmatch(name) for name in library.undefined):
        said.append("uses no symbol of libtorch's stable ABI at all")
    declared = tuple(map(int, PLATFORM.removeprefix("manylinux_").split("_")))
    if (needs := glibc(library.versions)) > declared:
        said.append(f"needs glibc {needs[0]}.{needs[1]}, the declared platform is {PLATFORM}")
    elif needs < declared:
        said.append(f"needs glibc {needs[0]}.{needs[1]} only: declare manylinux_{needs[0]}_{needs[1]}")
    if missing := sorted(set(architectures) - library.cubins):
        said.append(f"has no machine code for {', '.join(f'sm_{arch}' for arch in missing)}")
    if stray := sorted(library.cubins - set(architectures)):
        said.append(
            f"has machine code for {', '.join(f'sm_{arch}' for arch in stray)}, which is not declared"
        )
    if architectures[-1] not in library.ptx:
        said.append(f"has no PTX for compute_{architectures[-1]}, so later devices cannot run it")
    return tuple(said)


def audit_abi3(path: Path) -> tuple[str, ...]:
    """What abi3audit says against a library; its own words."""
    words = [sys.executable, "-m", "abi3audit", "--strict", "--verbose", "--assume-minimum-abi3", "3.10"]
    done = capture([*words, path], check=False, timeout_s=300)
    return () if done.returncode == 0 else (f"abi3audit: {(done.stdout + done.stderr).strip()}",)


LOAD = """
import ctypes, importlib.util, json, os, sys
import torch
path, schemas = sys.argv[1], sys.argv[2:]
ctypes.CDLL(path, os.RTLD_NOW)
spec = importlib.util.spec_from_file_location("_C", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
have = {str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("afd_plugin::")}
missing = sorted({f"afd_plugin::{schema}" for schema in schemas} ^ have)
assert not missing, f"csrc/ops.cpp and the loaded library differ in these operators: {missing}"
print(f"loaded, {len(have)} operators", *sorted(have), sep="\\n  ")
"""


def defined_operators(source: str) -> tuple[str, ...]:
    """The schemas in the `STABLE_TORCH_LIBRARY` block of ops.cpp."""
    return tuple(
        "".join(re.findall(r'"([^"]*)"', call)) for call in re.findall(r"\.def\(((?:\s*\"[^\"]*\")+)", source)
    )


def load(path: Path, schemas: Sequence[str]) -> str:
    """Bind every symbol, import the module, compare the operators; CommandError with the first fault."""
    return capture([sys.executable, "-c", LOAD, path, *schemas], timeout_s=300).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything holds, 1 for a fault, 3 when it cannot be built here."""
    parser = argparse.ArgumentParser(prog="python -m qualify.abi", description=__doc__)
    parser.add_argument("--library", type=Path, help="judge this one instead of building")
    chosen = parser.parse_args(arguments)
    sources = [csrc.ROOT / "csrc" / name for name in (*csrc.SOURCES, *csrc.HEADERS)]
    if not any(path.is_file() for path in sources):
        names = ", ".join(str(path.relative_to(csrc.ROOT)) for path in sources)
        print(f"abi: {names}: none is there, and they are tracked", file=sys.stderr)
        return 1
    import torch

    with tempfile.TemporaryDirectory(prefix="afd-abi-") as scratch:
        try:
            path = chosen.library or csrc.build(Path(scratch) / csrc.OUTPUT.name)
            faults = judge(path, new_abi=bool(torch.compiled_with_cxx11_abi()))
        except csrc.BuildError as error:
            print(f"abi: BLOCKED: {error}", file=sys.stderr)
            return 3
        except CommandError as error:
            faults = (str(error),)
    print(*(f"abi: {line}" for line in faults), sep="\n", file=sys.stderr)
    return 1 if faults else 0


def judge(path: Path, *, new_abi: bool) -> tuple[str, ...]:
    """Every fault of a library; prints what it is when there is none. CommandError when it cannot be read."""
    library = read(path)
    faults = (*complaints(library, csrc.ARCHITECTURES, new_abi=new_abi), *audit_abi3(path))
    if not faults:
        operators = (csrc.ROOT / "csrc" / "ops.cpp").read_text(encoding="utf-8")
        print(load(path, defined_operators(operators)).strip())
        print(f"{library.name} sha256 {csrc.digest(path)}, {PLATFORM}, machine code for {sorted(library.cubins)}, "
              f"PTX for {sorted(library.ptx)}, needs {', '.join(sorted(library.needed))}")  # fmt: skip
    return faults


if __name__ == "__main__":
    sys.exit(main())
