# SPDX-License-Identifier: Apache-2.0
from afd_plugin.v1.refusals import RULES
from qualify import refusals


def test_the_page_is_what_the_rules_say() -> None:
    assert refusals.DOCUMENT.read_text(encoding="utf-8") == refusals.render(), (
        "run `python -m qualify.refusals` and commit docs/refusals.md"
    )


def test_every_rule_stands_on_the_page_once() -> None:
    text = refusals.render()
    assert RULES
    for rule in RULES:
        assert text.count(f"| `{rule.feature}` |") == 1
