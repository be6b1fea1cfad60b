# SPDX-License-Identifier: Apache-2.0
"""The eight prompts of the demo, 3 to 150 tokens with the BOS, and the sampling they are sent with.

The longest ones exceed `max_num_batched_tokens` of the demo's engine arguments, so their prefill is chunked;
three share a prefix longer than a KV block, which prefix caching can reuse.
"""

_SHARED_PREFIX = "Attention keeps what a request touches; the experts answer layer by layer, and then: "

PROMPTS: tuple[str, ...] = (
    "Hi",
    "2+2=4",
    "The quick fox.",
    "A mixture of experts is",
    _SHARED_PREFIX,
    _SHARED_PREFIX + "one message there, one back",
    "Once upon a time a router chose two experts of eight; " * 2 + "why?",
    _SHARED_PREFIX + "no embedding, no head, no cache; only weights to multiply by....",
)
"""In the order in which they are sent."""

MAX_TOKENS = 32
"""Tokens generated for each prompt; EOS is ignored so that every answer has exactly as many."""
