# SPDX-License-Identifier: Apache-2.0
"""`afd status`: both roles at a glance, from what launchers of this host leave and from the roles' own endpoints."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import typer
from prometheus_client.parser import text_string_to_metric_families

from afd_plugin.supervisor.folder import STATE_NAME

_TIMEOUT_S = 5.0


@dataclass
class Row:
    """One process of a service that answers HTTP, or that will.

    Attributes:
        name: As the launcher calls it, or the URL.
        url: Its endpoint; empty while it has none.
        phase: What it last reported.
        well: Whether ``/health`` answered 200.
        steps, tokens, exchanges: Totals since its start.
        exchange_ms: Attention: mean host time of an exchange; FFN: mean compute time of one.
        peers: Neighbours that are up, of all known.
        restarts: FFN: how often it was started again; attention: how often it has met a new FFN.
    """

    name: str
    url: str = ""
    pid: int = 0
    phase: str = ""
    well: bool = False
    steps: int = 0
    tokens: int = 0
    exchanges: int = 0
    exchange_ms: float = 0.0
    peers: str = ""
    restarts: int = 0
    problem: str = field(default="", repr=False)


def run_status(urls: Sequence[str], as_json: bool) -> int:
    """Print the table for ``urls``, or for every service of this user on this host; 0 if all of it is well."""
    rows = (
        [Row(url, url.rstrip("/")) for url in urls] if urls else list(local_rows(Path(tempfile.gettempdir())))
    )
    for row in rows:
        ask(row)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        typer.echo(table(rows) if rows else "No service of this user runs here; name endpoints to ask.")
    return 0 if rows and all(row.well for row in rows) else 1


def local_rows(temporary: Path) -> Iterator[Row]:
    """What the launchers of this user left below ``temporary`` while they live."""
    for path in sorted(temporary.glob(f"afd-*/{STATE_NAME}")):
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_uid != os.getuid():
                continue
            state = json.loads(path.read_text())
            if not psutil.pid_exists(state["pid"]):
                continue
            for name, child in state["children"].items():
                url = child.get("url") or child.get("status") or ""
                yield Row(name, url, child["pid"], child["phase"], restarts=child.get("restarts", 0))


def ask(row: Row) -> None:
    """Fill in what the endpoint says."""
    if not row.url:
        row.problem = "no endpoint yet"
        return
    try:
        row.well = _get(row.url + "/health")[0] == 200
        row.phase = row.phase or ("serving" if row.well else "not well")
        digest(row, _get(row.url + "/metrics")[1])
    except (OSError, ValueError) as error:
        row.well = False
        row.problem = str(error)


def digest(row: Row, text: str) -> None:
    """Read AFD's metrics out of Prometheus text."""
    seconds, up, known = 0.0, 0, 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "afd:steps_total":
                row.steps += int(sample.value)
            elif sample.name == "afd:tokens_total":
                row.tokens += int(sample.value)
            elif sample.name == "afd:exchanges_total":
                row.exchanges += int(sample.value)
            elif sample.name == "afd:reconnects_total":
                row.restarts = max(row.restarts, int(sample.value))
            elif sample.name in ("afd:exchange_seconds_total", "afd:compute_seconds_total"):
                seconds += sample.value
            elif sample.name == "afd:peer_up":
                known += 1
                up += int(sample.value)
    row.exchange_ms = round(1000 * seconds / row.exchanges, 3) if row.exchanges else 0.0
    row.peers = f"{up}/{known}" if known else ""


def table(rows: Iterable[Row]) -> str:
    """Aligned text, one line per process."""
    cells = [("process", "phase", "well", "steps", "tokens", "ms/exchange", "peers", "restarts", "endpoint")]
    for row in rows:
        numbers = (
            str(row.steps),
            str(row.tokens),
            f"{row.exchange_ms:.3f}",
            row.peers or "-",
            str(row.restarts),
        )
        cells.append((row.name, row.phase, "yes" if row.well else "NO", *numbers, row.url or row.problem))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _get(url: str) -> tuple[int, str]:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no http address")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310  (the scheme is checked above)
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
