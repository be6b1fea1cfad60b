# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has an IPv6 loopback; a container's network often has none."""

from __future__ import annotations

import socket

import pytest


def _has_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_loopback(), reason="this machine has no IPv6 loopback")
