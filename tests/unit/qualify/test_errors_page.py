# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

from qualify.errors import DOCUMENT, _classes, render

ROOT = Path(__file__).parents[3]


def test_the_page_of_errors_is_what_the_classes_say() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "run `python -m qualify.errors`"


def test_every_error_has_a_name_a_meaning_and_a_mend_of_its_own() -> None:
    for kind in _classes():
        assert kind.__doc__, kind
        assert kind.mend, kind
        if kind.name != kind.__bases__[0].name:
            assert "mend" in vars(kind), f"{kind.__name__} has a name of its own but inherits its mend"


def test_every_fault_that_the_supervisor_names_is_on_the_page() -> None:
    source = (ROOT / "afd_plugin" / "supervisor" / "supervisor.py").read_text(encoding="utf-8")
    named = set(re.findall(r'_fault\(\s*[\w.]+,\s*"([a-z-]+)"', source))
    assert len(named) >= 6
    page = render()
    assert [name for name in sorted(named) if f"`{name}`" not in page] == []
