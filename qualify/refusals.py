# SPDX-License-Identifier: Apache-2.0
"""`python -m qualify.refusals` writes docs/refusals.md from the rules themselves; a test compares them."""

from __future__ import annotations

from pathlib import Path

from afd_plugin.v1.refusals import RULES

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "refusals.md"

HEAD = """\
# What is refused

Anything that AFD has not been shown to honour exactly is refused by name, before a request is served, in one sentence
and with exit code 2. This page is generated from the rules (`python -m qualify.refusals`).

## vLLM features

| name | what the refusal says |
|---|---|
"""

TAIL = """
## Models

A model without an MoE layer; a model whose MoE layers are not plain `MoERunner`s (vLLM's generic Transformers back end,
latent MoE, mega-MoE); hash-routed layers; expert weights outside any runner; another plugin that already replaces
`MoERunner` or `RoutedExperts`; a checkpoint that is not safetensors.

## Layouts

`[NonPositiveSize]` a size below 1 · `[GroupWithoutLane]` more FFN groups than attention lanes · `[UnevenLanes]` lanes
that cannot be dealt evenly · `[ExpertParallelOfOne]` expert parallelism on one FFN rank · `[SeparateFFNWorlds]` FFN
replicas, each with all experts, that share no vLLM world · `[ShardsOfOneRank]` FFN shards of several ranks ·
`[DenseAmongShards]` dense MLPs on the FFN where its experts are split · `[IndependentLanesOfOneGroup]` attention
engines of their own with several FFN groups · `[SharedAmongAttentionRanks]` shared experts on attention with tensor
parallelism there.

## Roles that do not fit each other

Every field of the fingerprint is compared before weights are read; a difference is refused on both sides with both
values. A wrong token, a second process for the same lane and another protocol version are refused by name.
"""


def render() -> str:
    """The page's text."""
    rows = (f"| `{rule.feature}` | {rule.sentence} |\n" for rule in RULES)
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
