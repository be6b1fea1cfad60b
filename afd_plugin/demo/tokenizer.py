# SPDX-License-Identifier: Apache-2.0
"""A character tokenizer for the test checkpoints: one character is one token, offline, no training.

The vocabulary is 4 special tokens and 252 printable characters, so every id decodes to its own text and a
prompt of n characters is n + 1 tokens (a BOS is put in front, as DeepSeek's tokenizers do). Characters
outside it become `<unk>`.
"""

import json
from pathlib import Path
from typing import Any

from afd_plugin.demo.recipes import (
    BOS_ID,
    BOS_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    UNKNOWN_TOKEN,
    VOCABULARY_SIZE,
)

SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN)
"""By id, from 0."""

_PRINTABLE_RANGES = ((0x20, 0x7F), (0xA1, 0xAD), (0xAE, 0x180))


def vocabulary() -> list[str]:
    """All tokens by id: special tokens, newline, then printable ASCII, Latin-1 and Latin Extended-A."""
    characters = ["\n", *(chr(code) for start, stop in _PRINTABLE_RANGES for code in range(start, stop))]
    return [*SPECIAL_TOKENS, *characters][:VOCABULARY_SIZE]


def tokenizer_json() -> dict[str, Any]:
    """The `tokenizer.json` of a fast tokenizer: isolate characters, look them up, put BOS in front."""
    tokens = vocabulary()
    special = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    bos = {"SpecialToken": {"id": BOS_TOKEN, "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {BOS_TOKEN: {"id": BOS_TOKEN, "ids": [BOS_ID], "tokens": [BOS_TOKEN]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "unk_token": UNKNOWN_TOKEN,
        },
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """The `tokenizer_config.json` that lets `transformers` load it with no code and no network."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "unk_token": UNKNOWN_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def write_tokenizer(folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    for name, content in (
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", tokenizer_config(max_length)),
    ):
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
