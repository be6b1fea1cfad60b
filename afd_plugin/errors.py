# SPDX-License-Identifier: Apache-2.0
"""Every refusal and failure of afd_plugin, one class each.

An error is a sentence: what was seen, what was expected, which knob mends it. Each class carries

* ``name``: a stable identifier for logs and for the error index in the documentation;
* ``exit_code``: what a process that ends because of it returns (2: the input was refused before
  anything was served; 3: a peer was lost or failed; 4: the roles did not find each other in time;
  1: anything else).

This module imports nothing, so that every layer can raise these errors.
"""

from __future__ import annotations


class AFDError(Exception):
    """Base of every error that afd_plugin raises on purpose.

    Args:
        message: One or more sentences for the person who runs the service.
    """

    name: str = "afd-error"
    exit_code: int = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def line(self) -> str:
        """Returns the form used in logs and on the console: ``name: message``."""
        return f"{self.name}: {self}"


class Refused(AFDError):
    """Something was refused before any request was served."""

    name = "refused"
    exit_code = 2


class ConfigRefused(Refused):
    """A configuration value is unknown, malformed or contradicts another one."""

    name = "config-refused"


class TopologyRefused(Refused):
    """The combination of parallel sizes is not exact, so it is not run.

    Args:
        reason: Stable identifier of the rule that refused it, for tables and tests.
        message: The sentence.
    """

    name = "topology-refused"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[TopologyRefused], tuple[str, str]]:
        return type(self), (self.reason, self.message)


class UnsupportedFeature(Refused):
    """A vLLM feature was requested that cannot be honoured under AFD."""

    name = "unsupported-feature"


class ModelRefused(Refused):
    """The model cannot be split: it has no MoE layer, or one that the seam does not reach."""

    name = "model-refused"


class PortInUse(Refused):
    """A listening address is already taken."""

    name = "port-in-use"


class AddressRefused(Refused):
    """A listening or peer address cannot be parsed, resolved or bound."""

    name = "address-refused"


class FingerprintMismatch(Refused):
    """The roles were started with different models, versions or placements.

    Args:
        message: The sentence, ending in one line per differing field.
        differences: These lines alone.
    """

    name = "fingerprint-mismatch"

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences

    def __reduce__(self) -> tuple[type[FingerprintMismatch], tuple[str, tuple[str, ...]]]:
        return type(self), (self.message, self.differences)


class TokenRejected(Refused):
    """The pre-shared token of a process differs from that of the rendezvous host."""

    name = "token-rejected"


class ProtocolVersionMismatch(Refused):
    """The two ends speak different versions of the control protocol."""

    name = "protocol-version-mismatch"


class DuplicateMember(Refused):
    """Two processes claim the same attention lane or the same FFN group."""

    name = "duplicate-member"


class UnknownMember(Refused):
    """A process claims an attention lane or FFN group that the topology does not have."""

    name = "unknown-member"


class RendezvousTimeout(AFDError):
    """The members of the service did not find each other, or did not become ready, in time."""

    name = "rendezvous-timeout"
    exit_code = 4


class PeerFailure(AFDError):
    """The other role is gone or has failed; requests in flight cannot be answered."""

    name = "peer-failure"
    exit_code = 3


class PeerLost(PeerFailure):
    """A peer's connection closed without a farewell, or it has been silent for too long."""

    name = "peer-lost"


class PeerAborted(PeerFailure):
    """A peer failed and said why.

    Args:
        message: The sentence that names the peer and its error.
        remote_error: The peer's own error text.
        traceback_tail: The last lines of the peer's traceback, oldest first; may be empty.
    """

    name = "peer-aborted"

    def __init__(self, message: str, remote_error: str = "", traceback_tail: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.remote_error = remote_error
        self.traceback_tail = traceback_tail

    def __str__(self) -> str:
        if not self.traceback_tail:
            return self.message
        return "\n".join([self.message, "The last lines of its traceback:", *self.traceback_tail])

    def __reduce__(self) -> tuple[type[PeerAborted], tuple[str, str, tuple[str, ...]]]:
        return type(self), (self.message, self.remote_error, self.traceback_tail)


class PeerShutDown(PeerFailure):
    """A peer ended in good order while this process still needed it."""

    name = "peer-shut-down"


class EngineGone(AFDError):
    """The process of vLLM above a worker has died: the engine core, or the FFN's host."""

    name = "engine-gone"


class ProtocolError(AFDError):
    """A peer sent a message that contradicts the protocol or another peer's message."""

    name = "protocol-error"
    exit_code = 3


class ControlClosed(AFDError):
    """The control plane was used after close() or before it was connected."""

    name = "control-closed"


def by_name(name: str) -> type[AFDError] | None:
    """The error class whose stable ``name`` this is, or ``None``; for errors that crossed a wire."""
    return _all_errors().get(name)


def _all_errors() -> dict[str, type[AFDError]]:
    found: dict[str, type[AFDError]] = {}
    open_classes: list[type[AFDError]] = [AFDError]
    while open_classes:
        kind = open_classes.pop()
        found.setdefault(kind.name, kind)
        open_classes.extend(kind.__subclasses__())
    return found
