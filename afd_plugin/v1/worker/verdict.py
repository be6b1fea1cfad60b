# SPDX-License-Identifier: Apache-2.0
"""Which error to show when the data plane and the control plane both notice the end of a peer.

The data plane notices first, by a closed connection, and knows little; the control plane knows a tenth of a second
later which process it was, or what that process said of itself.
"""

from __future__ import annotations

import time
from typing import TypeVar

from afd_plugin.control.link import Control
from afd_plugin.errors import PeerFailure, PeerLost

PATIENCE_S = 0.5

_E = TypeVar("_E", bound=BaseException)


def verdict(control: Control | None, error: _E, patience_s: float = PATIENCE_S) -> _E | PeerFailure:
    """The control plane's account of a lost peer if it comes within ``patience_s`` seconds, else ``error`` itself."""
    if control is None or not isinstance(error, PeerLost):
        return error
    deadline = time.monotonic() + patience_s
    while True:
        try:
            control.check()
        except PeerFailure as known:
            return known
        if time.monotonic() >= deadline:
            return error
        time.sleep(0.01)
