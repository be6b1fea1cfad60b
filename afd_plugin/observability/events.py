# SPDX-License-Identifier: Apache-2.0
"""Events in the log that a machine can read: one line of ``key=value`` pairs each, with epoch and step.

``afd event=peer-lost role=attention rank=0-0 epoch=6f2c... step=17 error="..."``: logfmt, which log collectors
read as it is. The epoch names one life of the service, in hexadecimal, and is the same in all its processes, so
the lines of two hosts can be joined by (epoch, step).
"""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r"[^\s\"=]+")


def event(name: str, *, epoch: int | None = None, step: int | None = None, **fields: object) -> str:
    """The line for the event ``name``; ``None`` values are left out, order is kept."""
    pairs: dict[str, object] = {"event": name, **fields}
    pairs["epoch"] = None if epoch is None else f"{epoch:x}"
    pairs["step"] = step
    return "afd " + " ".join(f"{key}={_value(value)}" for key, value in pairs.items() if value is not None)


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
