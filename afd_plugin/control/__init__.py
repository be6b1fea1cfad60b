# SPDX-License-Identifier: Apache-2.0
"""The control plane: who takes part, what runs next, who has failed. No torch, no vLLM, no pickle.

Members are the leader (tensor-parallel rank 0) of every attention lane and of every FFN group. Each makes one
:class:`AttentionControl` or :class:`FFNControl` per life of the service, and calls, from one thread:

=============================  ==========================================================================
once, model built, no weights  ``connect()`` / ``listen()``: bind, rendezvous at FFN group 0, compare
                               fingerprints, start the monitor thread. Bounded by ``rendezvous_timeout_s``.
once, weights loaded           ``ready()`` says so and returns; ``wait_ready()`` is the barrier over all
                               members. Bounded by ``ready_timeout_s``, and by the peers' liveness.
once per forward pass          attention: ``announce(plan)``, before the model runs; encodes and queues one
                               message, waits for nobody (tens of microseconds).
                               FFN: ``next_event()`` sleeps in poll until all lanes of the group have
                               announced the same plan; no processor time while idle.
now and then                   attention: ``profile()``, ``drain()``; in band, ordered with the steps.
between exchanges              ``check()`` raises what the monitor thread has recorded.
once, at the end               attention: ``shutdown()`` in band; both: ``close()`` releases everything.
                               The FFN's ``next_event()`` returns :class:`Shutdown` when all lanes of its
                               group have sent it. A lane that stops alone fails its group after
                               ``drain_timeout_s``, or at the next step, which it can no longer join.
=============================  ==========================================================================

Failure: the monitor thread exchanges heartbeats with the neighbours and sees closed connections. A member
that fails calls ``abort(error)``; one that dies or falls silent is found by its neighbours, within
``failure_timeout_s`` at most. Either way every member records the first cause, a blocked ``wait_ready()`` or
``next_event()`` raises it, later calls raise it, and callbacks given to ``on_failure()`` run once, in the
monitor thread: what blocks elsewhere (a data-plane wait) is for them to release. A peer that said farewell is
no failure, except an FFN group that leaves an attention lane which has not shut down.

Side effects: sockets, one monitor thread and zmq's two threads, all gone after ``close()``; log records. An
FFN group leader listens on two ports: ``listen`` (rendezvous, READY, STEP) and one that the system chooses on
the same host (heartbeats); the directory in :class:`Membership` tells everybody both, and no port is derived
from another.

Security: connections are CURVE-encrypted under the pre-shared token; without it no byte reaches a decoder.
Frames and queues are bounded; what does not decode, or comes from no member, or belongs to another life
(``epoch``), is dropped and counted in :class:`Statistics`.
"""

from __future__ import annotations

from afd_plugin.control.attention import AttentionControl
from afd_plugin.control.ffn import FFNControl
from afd_plugin.control.fingerprint import Fingerprint, diff
from afd_plugin.control.link import Control
from afd_plugin.control.membership import Membership
from afd_plugin.control.merge import Event
from afd_plugin.control.messages import Drain, Member, MemberId, Profile, Shutdown
from afd_plugin.control.statistics import Statistics

__all__ = [
    "AttentionControl",
    "Control",
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
