# SPDX-License-Identifier: Apache-2.0
"""Control plane (being filled in): see link.py for the two ends that workers use."""

from __future__ import annotations

from afd_plugin.control.attention import AttentionControl
from afd_plugin.control.ffn import FFNControl
from afd_plugin.control.fingerprint import Fingerprint, diff
from afd_plugin.control.membership import Membership
from afd_plugin.control.merge import Event
from afd_plugin.control.messages import Drain, Member, MemberId, Profile, Shutdown
from afd_plugin.control.statistics import Statistics

__all__ = [
    "AttentionControl",
    "Drain",
    "Event",
    "FFNControl",
    "Fingerprint",
    "Member",
    "MemberId",
    "Membership",
    "Profile",
    "Shutdown",
    "Statistics",
    "diff",
]
