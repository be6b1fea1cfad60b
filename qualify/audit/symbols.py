# SPDX-License-Identifier: Apache-2.0
"""The words all checks share: a symbol, and a use of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, order=True)
class Symbol:
    """A definition: its module and its qualified name in it (empty for the module itself)."""

    module: str
    qualname: str = ""

    @classmethod
    def parse(cls, text: str) -> Symbol:
        """From `module:qualname`."""
        module, _, qualname = text.partition(":")
        return cls(module, qualname)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def member(self, name: str) -> Symbol:
        """The symbol `name` defined directly in this one."""
        return Symbol(self.module, f"{self.qualname}.{name}" if self.qualname else name)

    @property
    def owner(self) -> Symbol:
        """The class or module that defines it."""
        return Symbol(self.module, self.qualname.rpartition(".")[0])

    @property
    def name(self) -> str:
        """The last part of the qualified name."""
        return self.qualname.rpartition(".")[2]

    @property
    def upstream(self) -> bool:
        """Whether it belongs to vLLM."""
        return belongs(self.module, "vllm")


def belongs(name: str, package: str) -> bool:
    """Whether a dotted name is `package` or lies below it."""
    return name == package or name.startswith(package + ".")


def is_private(dotted: str) -> bool:
    """Whether any part of a dotted name says that it is private."""
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


class How(str, Enum):
    """In what way a symbol is used."""

    IMPORT = "imports"
    STRING = "names in a string"
    READ = "reads"
    WRITE = "assigns"
    SUBCLASS = "subclasses"
    OVERRIDE = "overrides"
    MUTATE = "changes"


@dataclass(frozen=True, order=True)
class Use:
    """One use of an upstream symbol in a file of ours."""

    symbol: Symbol
    how: How
    path: str
    line: int
    required: bool = True
    """False where no entry is demanded, but one that exists counts as used (public parts of torch)."""
