# SPDX-License-Identifier: Apache-2.0
"""Every refusal and failure of afd_plugin, one class each.

An error is a sentence: what was seen, what was expected, which knob mends it. Each class carries

* ``name``: a stable identifier for logs and for the error index in the documentation (docs/errors.md);
* ``mend``: what usually helps, for that index;
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
    mend: str = "The log above the line has the details."
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
    mend = "Do what the sentence says; nothing was served yet."
    exit_code = 2


class ConfigRefused(Refused):
    """A configuration value is unknown, malformed or contradicts another one."""

    name = "config-refused"
    mend = "Correct the option or variable that the sentence names."


class TopologyRefused(Refused):
    """The combination of parallel sizes is not exact, so it is not run.

    Args:
        reason: Stable identifier of the rule that refused it, for tables and tests.
        message: The sentence.
    """

    name = "topology-refused"
    mend = (
        "Choose parallel sizes that the sentence allows; `afd check` judges them without starting anything."
    )

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[TopologyRefused], tuple[str, str]]:
        return type(self), (self.reason, self.message)


class UnsupportedFeature(Refused):
    """A vLLM feature was requested that cannot be honoured under AFD."""

    name = "unsupported-feature"
    mend = "Drop the option of vLLM that the sentence names; docs/refusals.md lists them all."


class ModelRefused(Refused):
    """The model cannot be split: it has no MoE layer, or one that the seam does not reach."""

    name = "model-refused"
    mend = (
        "Serve this model with plain vLLM, or choose an MoE model whose experts vLLM builds as plain runners."
    )


class PortInUse(Refused):
    """A listening address is already taken."""

    name = "port-in-use"
    mend = "End the process that holds the port, or name another one."


class AddressRefused(Refused):
    """A listening or peer address cannot be parsed, resolved or bound."""

    name = "address-refused"
    mend = (
        "Correct --listen, --peer or --advertise: the first must be an address of this host, "
        "the others one that peers reach."
    )


class FingerprintMismatch(Refused):
    """The roles were started with different models, versions or placements.

    Args:
        message: The sentence, ending in one line per differing field.
        differences: These lines alone.
    """

    name = "fingerprint-mismatch"
    mend = (
        "Start both roles with the same model, versions, placements and limits; each "
        "differing field has a line of its own."
    )

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences

    def __reduce__(self) -> tuple[type[FingerprintMismatch], tuple[str, tuple[str, ...]]]:
        return type(self), (self.message, self.differences)


class TokenRejected(Refused):
    """The pre-shared token of a process differs from that of the rendezvous host."""

    name = "token-rejected"
    mend = "Give both roles the same AFD_TOKEN or --token-file."


class ProtocolVersionMismatch(Refused):
    """The two ends speak different versions of the control protocol."""

    name = "protocol-version-mismatch"
    mend = "Install the same version of afd-plugin on both sides."


class DuplicateMember(Refused):
    """Two processes claim the same attention lane or the same FFN group."""

    name = "duplicate-member"
    mend = "Start each lane and each group once; end the process of an earlier life that still runs."


class UnknownMember(Refused):
    """A process claims an attention lane or FFN group that the topology does not have."""

    name = "unknown-member"
    mend = "Start both roles with the same parallel sizes."


class RendezvousTimeout(AFDError):
    """The members of the service did not find each other, or did not become ready, in time."""

    name = "rendezvous-timeout"
    mend = (
        "Start the member that the sentence misses, make its address reachable, or raise "
        "--rendezvous-timeout or --ready-timeout."
    )
    exit_code = 4


class PeerFailure(AFDError):
    """The other role is gone or has failed; requests in flight cannot be answered."""

    name = "peer-failure"
    mend = "Look at the other role's log; then start the service again."
    exit_code = 3

    may_return: bool = False
    """Whether it is an FFN that its launcher may start again, so that attention may wait for it."""


class PeerLost(PeerFailure):
    """A peer's connection closed without a farewell, or it has been silent for too long."""

    name = "peer-lost"
    mend = (
        "Look at the other role's log and host: the process was killed, stopped or cut off. "
        "Then start the service again."
    )


class PeerAborted(PeerFailure):
    """A peer failed and said why.

    Args:
        message: The sentence that names the peer and its error.
        remote_error: The peer's own error text.
        traceback_tail: The last lines of the peer's traceback, oldest first; may be empty.
    """

    name = "peer-aborted"
    mend = "The sentence quotes the other role's error; its log has the whole traceback."

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
    mend = "Stop attention first, or let `afd serve` do it; the FFN ends by itself."


class AskedToEnd(PeerFailure):
    """A peer was asked to end (SIGTERM) while this process still needed it; nobody will start it again."""

    name = "asked-to-end"
    mend = "Stop attention first, or let `afd serve` do it; the FFN ends by itself."


class EngineGone(AFDError):
    """The process of vLLM above a worker has died: the engine core, or the FFN's host."""

    name = "engine-gone"
    mend = (
        "Look at the log for why vLLM's process ended; when nothing is said there, the "
        "system's log (out of memory?)."
    )


class DrainTimeout(AFDError):
    """Requests still ran when the time for a clean stop was over, and ended with an error; or a process did not end."""

    name = "drain-timeout"
    mend = "Raise --drain-timeout above what the longest request takes."


class ProtocolError(AFDError):
    """A peer sent a message that contradicts the protocol or another peer's message."""

    name = "protocol-error"
    mend = "A fault of this plugin or of the network between: report it with both logs."
    exit_code = 3


class NotResumable(ProtocolError):
    """The FFN was started again, but the step that it left cannot go on."""

    name = "not-resumable"
    mend = "Start all attention lanes with the same --ffn-restart-window; else a fault of this plugin: report it."


class ControlClosed(AFDError):
    """The control plane was used after close() or before it was connected."""

    name = "control-closed"
    mend = "A fault of this plugin: report it with the traceback."


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
