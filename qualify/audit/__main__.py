# SPDX-License-Identifier: Apache-2.0
"""`python -m qualify.audit`: all checks, one line per finding, a JSON report, exit code 1 on any finding."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from afd_plugin.seams import REGISTRY
from afd_plugin.seams.schema import Registry
from qualify.audit import (
    attributes,
    copies,
    drift,
    imports,
    overrides,
    patches,
    record,
    references,
    traced,
)
from qualify.audit.coverage import Coverage
from qualify.audit.sources import Package
from qualify.audit.symbols import Use
from qualify.audit.upstream import Upstream, UpstreamError
from qualify.lint.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "afd_plugin"


@dataclass
class Audit:
    """One run: what was looked at, what was found."""

    upstream: Upstream
    package: Package
    registry: Registry
    coverage: Coverage
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def take(self, check: str, results: Iterable[Use | Finding]) -> None:
        """Run one check; keep its findings and match its uses."""
        started = time.monotonic()
        uses: list[Use] = []
        for result in results:
            if isinstance(result, Finding):
                self.findings.append(result)
            else:
                uses.append(result)
        self.coverage.take(uses)
        self.seconds[check] = round(time.monotonic() - started, 2)

    def count(self, rule: str) -> int:
        """How many findings break a rule."""
        return sum(finding.rule == rule for finding in self.findings)

    def report(self) -> dict[str, object]:
        """The machine-readable result."""
        return {
            "seams": len(self.registry.seams),
            "surfaces": len(self.registry.surfaces),
            "surface_names": sum(len(s.names) for s in self.registry.surfaces),
            "patch_count": self.count("patch"),
            "copied_functions": self.count("copy"),
            "uses": {
                id_: sorted(f"{u.path}:{u.line} {u.how.value} {u.symbol}" for u in uses)
                for id_, uses in sorted(self.coverage.found.items())
            },
            "findings": [vars(finding) for finding in self.findings],
            "seconds": self.seconds,
        }


def run(
    upstream: Upstream,
    package: Package,
    registry: Registry,
    *,
    config: Path,
    cache: Path | None = None,
    traces: Sequence[Path] = (),
) -> Audit:
    """All checks over one package and one registry."""
    audit = Audit(upstream, package, registry, Coverage(registry))
    audit.take("drift", drift.check(registry, upstream))
    audit.take("references", references.check(registry, package.root))
    audit.take("imports", imports.uses(package, upstream))
    audit.take("overrides", overrides.uses(package, upstream))
    audit.take("attributes", attributes.uses(package, upstream, config, cache))
    audit.take("traced", traced.uses(traces, upstream, audit.coverage.named))
    audit.take("patches", patches.uses(package, upstream))
    audit.take("copies", copies.check(package, upstream.root("vllm")))
    audit.findings += audit.coverage.findings()
    audit.findings = sorted(set(audit.findings))
    return audit


def summary(audit: Audit) -> Iterator[str]:
    """What a reader needs: each finding, then the counts."""
    yield from map(str, audit.findings)
    names = sum(len(surface.names) for surface in audit.registry.surfaces)
    yield (
        f"{len(audit.registry.seams)} seams, {names} plain names in {len(audit.registry.surfaces)} surfaces, "
        f"patch count {audit.count('patch')}, copied functions {audit.count('copy')}, "
        f"findings {len(audit.findings)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, print; 0 when nothing was found, 1 when something was, 2 for a bad request."""
    parser = argparse.ArgumentParser(prog="python -m qualify.audit", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    parser.add_argument(
        "--vllm-root", type=Path, metavar="DIR", help="an unpacked vLLM instead of the installed one"
    )
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], metavar="PATH", help="traces of a run"
    )
    parser.add_argument(
        "--drift", action="store_true", help="only compare the registry with vLLM (one second)"
    )
    parser.add_argument(
        "--record", metavar="ID", help="print what entry ID should hold now, and do nothing else"
    )
    parser.add_argument(
        "--propose", action="store_true", help="also print skeletons for what is not registered"
    )
    chosen = parser.parse_args(arguments)
    try:
        upstream = Upstream.installed(chosen.vllm_root)
    except UpstreamError as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.record:
        try:
            print(record.record(REGISTRY, chosen.record, upstream))
        except KeyError:
            print(f"no entry is called {chosen.record}", file=sys.stderr)
            return 2
        return 0
    if chosen.drift:
        faults = sorted(drift.check(REGISTRY, upstream))
        print(*faults, f"{len(faults)} of the registry's entries have drifted", sep="\n")
        return 1 if faults else 0
    cache = os.environ.get("MYPY_CACHE_DIR")
    audit = run(
        upstream,
        Package(ROOT, PACKAGE),
        REGISTRY,
        config=ROOT / "pyproject.toml",
        cache=Path(cache) if cache else None,
        traces=chosen.trace,
    )
    if chosen.propose:
        print(*record.propose(audit.coverage.uncovered, upstream), sep="\n")
    print(*summary(audit), sep="\n")
    if chosen.json:
        chosen.json.write_text(json.dumps(audit.report(), indent=1) + "\n", encoding="utf-8")
    return 1 if audit.findings else 0


if __name__ == "__main__":
    sys.exit(main())
