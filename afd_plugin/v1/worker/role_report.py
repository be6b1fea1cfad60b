# SPDX-License-Identifier: Apache-2.0
"""A small JSON file per worker: what it holds, what it read, what it did. For demo, tests and evidence.

Written only when ``AFD_ROLE_REPORT_DIR`` names a directory: once when the roles are connected and again at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

DIRECTORY_VARIABLE = "AFD_ROLE_REPORT_DIR"

RECENT = 4096
"""How many of its last exchanges a worker keeps the host times of."""


def write(name: str, content: Mapping[str, object]) -> None:
    """Write ``<name>.json`` atomically; does nothing without the environment variable."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    path = Path(directory) / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
