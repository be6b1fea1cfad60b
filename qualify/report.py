# SPDX-License-Identifier: Apache-2.0
"""Render the ledgers: Markdown for the repository, one self-contained HTML page for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from qualify import ledger, revision, support
from qualify.cells import CELLS, ROOT, Cell, parse
from qualify.ledger import LedgerError, Record
from qualify.support import Row

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>afd-plugin: evidence</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .35rem .6rem; text-align: left; vertical-align: top; }
code { font-size: 90%; } .mono { font-family: monospace; overflow-wrap: anywhere; }
.PASS, .validated { color: #17692e; } .FAIL, .unvalidated { color: #a3271c; }
.BLOCKED, .STOPPED, .landing { color: #8a5a00; } .SKIPPED, .historical { color: #555; }
td[class] { font-weight: 600; }
</style></head><body>
<h1>Evidence of afd-plugin</h1>
<p>Revision <span class="mono">{{ revision }}</span>. CPU evidence is never a claim about a GPU.</p>
<h2>What is supported</h2>
<table><tr><th>layer</th><th>claim</th><th>cell</th><th>state</th><th>evidence</th></tr>
{%- for row in rows %}
<tr><td>{{ row.layer }}</td><td>{{ row.claim }}</td><td>{{ row.cell }}</td>
<td class="{{ row.state.value }}">{{ row.state.value }}</td><td>{{ row.why }}</td></tr>
{%- endfor %}
</table>
{%- for cell, records in ledgers.items() %}
<h2>Cell {{ cell }}</h2>
{%- if cell in unsound %}<p class="FAIL">The ledger is not sound: {{ unsound[cell] }}</p>{% endif %}
{%- if cells[cell].debt %}
<p>Never seen, so not claimed:</p><ul>
{%- for name, why in cells[cell].debt.items() %}<li><code>{{ name }}</code>: {{ why }}</li>{% endfor %}</ul>
{%- endif %}
{%- if records %}
<table><tr><th>#</th><th>started</th><th>session</th><th>profile</th><th>status</th><th>cases</th><th>seconds</th>
<th>blocker</th><th>revision</th></tr>
{%- for record in records %}{% set e = record.entry %}
<tr><td>{{ record.sequence }}</td><td>{{ e.started }}</td><td>{{ e.session or "identity" }} {{ e.shard }}</td>
<td>{{ e.profile }}</td><td class="{{ e.status.value }}">{{ e.status.value }}</td>
<td>{% if e.counts %}{{ e.counts.passed }}/{{ e.counts.collected }}{% endif %}</td><td>{{ e.seconds }}</td>
<td>{{ e.blocker if e.blocker != "none" else "" }}</td><td class="mono">{{ e.revision[:12] }}</td></tr>
{%- endfor %}
</table>
<p>Head <span class="mono">{{ records[-1].hash }}</span></p>
{%- else %}<p>No record.</p>{% endif %}
{%- endfor %}
</body></html>
"""


class Evidence:
    """All ledgers of a checkout as they are now, and what they allow to be claimed at this revision."""

    def __init__(self, root: Path = ROOT, directory: Path | None = None) -> None:
        """Read everything; an unsound ledger counts as empty and is named in `unsound`."""
        self.revision = revision.revision(root)
        self.cells: Mapping[str, Cell] = parse((root / CELLS.relative_to(ROOT)).read_text(encoding="utf-8"))
        self.ledgers: dict[str, Sequence[Record]] = {}
        self.unsound: dict[str, str] = {}
        for name in self.cells:
            try:
                self.ledgers[name] = ledger.read(name, directory or root / "evidence")
            except LedgerError as error:
                self.ledgers[name], self.unsound[name] = (), str(error)

    def rows(self) -> tuple[Row, ...]:
        """The support matrix."""
        return support.rows(self.ledgers, dict.fromkeys(self.cells, self.revision))


def markdown(evidence: Evidence) -> str:
    """The report as a Markdown page."""
    lines = [
        "# Support",
        "",
        "Generated from the evidence by `nox -s docs -- --write`; not edited by hand.",
        "",
    ]
    lines += [support.table(evidence.rows())]
    for name, cell in evidence.cells.items():
        records = evidence.ledgers[name]
        lines += [f"## Cell {name}: {cell.summary}", ""]
        if name in evidence.unsound:
            lines += [f"The ledger is not sound: {evidence.unsound[name]}", ""]
        lines += [f"- never seen: `{field}`: {why}" for field, why in cell.debt.items()]
        lines += [f"- {len(records)} records, head `{records[-1].hash if records else 'none'}`", ""]
    return "\n".join(lines).rstrip() + "\n"


def html(evidence: Evidence) -> str:
    """The report as one HTML page without any outside reference."""
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_PAGE)
    return page.render(
        revision=evidence.revision,
        rows=evidence.rows(),
        ledgers=evidence.ledgers,
        cells=evidence.cells,
        unsound=evidence.unsound,
    )
