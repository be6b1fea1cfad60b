# SPDX-License-Identifier: Apache-2.0
"""The uses that a traced run recorded (`trace` writes them)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from qualify.audit.symbols import How, Symbol, Use
from qualify.audit.upstream import Upstream
from qualify.lint.findings import Finding

_UNIVERSAL = frozenset({"__class__", "__dict__", "__doc__", "__module__", "__name__", "__qualname__"})


def uses(places: Sequence[Path], upstream: Upstream, named: Set[Symbol]) -> Iterator[Use | Finding]:
    """The uses in trace files, or in all trace files of a directory; a finding where there are none.

    ``named`` are the symbols that the registry names (:attr:`qualify.audit.coverage.Coverage.named`).
    """
    for place in places:
        files = sorted(place.glob("**/trace-*.jsonl")) if place.is_dir() else [place]
        if not files:
            yield Finding(str(place), 1, "trace", "holds no trace: run the traced tests first")
        for file in files:
            for line in file.read_text(encoding="utf-8").splitlines():
                yield from _use(json.loads(line), upstream, named)


def _use(record: dict[str, object], upstream: Upstream, named: Set[Symbol]) -> Iterator[Use]:
    """The use of one record: of the nearest class that the registry names, else of the nearest that defines it.

    Our mixins are typed against a base class of what runs (``Worker`` where a ``CPUWorker`` runs), and the registry
    names what they are typed against.
    """
    owners, name = record["owners"], str(record["name"])
    if not isinstance(owners, list) or name in _UNIVERSAL:
        return
    defined = [
        symbol
        for owner in map(Symbol.parse, owners)
        if (symbol := _defined(owner, name, upstream)) is not None
    ]
    symbol = next((symbol for symbol in defined if symbol in named), defined[0] if defined else None)
    if symbol is not None and symbol.upstream:
        yield Use(symbol, How.READ, str(record["path"]), int(str(record["line"])))


def _defined(owner: Symbol, name: str, upstream: Upstream) -> Symbol | None:
    if not owner.qualname:
        return upstream.resolve(owner.module, name)
    return owner.member(name) if upstream.definition(owner.member(name)) else None
