# SPDX-License-Identifier: Apache-2.0
"""The uses that a traced run recorded (`trace` writes them)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from qualify.audit.symbols import How, Symbol, Use
from qualify.audit.upstream import Upstream
from qualify.lint.findings import Finding

_UNIVERSAL = frozenset({"__class__", "__dict__", "__doc__", "__module__", "__name__", "__qualname__"})


def uses(places: Sequence[Path], upstream: Upstream) -> Iterator[Use | Finding]:
    """The uses in trace files, or in all trace files of a directory; a finding where there are none."""
    for place in places:
        files = sorted(place.glob("**/trace-*.jsonl")) if place.is_dir() else [place]
        if not files:
            yield Finding(str(place), 1, "trace", "holds no trace: run the traced tests first")
        for file in files:
            for line in file.read_text(encoding="utf-8").splitlines():
                yield from _use(json.loads(line), upstream)


def _use(record: dict[str, object], upstream: Upstream) -> Iterator[Use]:
    owners, name = record["owners"], str(record["name"])
    if not isinstance(owners, list) or name in _UNIVERSAL:
        return
    for owner in map(Symbol.parse, owners):
        if not owner.qualname:
            symbol = upstream.resolve(owner.module, name)
        else:
            symbol = owner.member(name) if upstream.definition(owner.member(name)) else None
        if symbol is not None:
            if symbol.upstream:
                yield Use(symbol, How.READ, str(record["path"]), int(str(record["line"])))
            return
