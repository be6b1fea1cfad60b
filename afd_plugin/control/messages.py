# SPDX-License-Identifier: Apache-2.0
"""The messages of the control plane and their encoding.

Every message is one MessagePack map tagged with its kind, decoded into a typed, frozen struct; nothing is
pickled. A frame is at most :data:`MAX_FRAME_BYTES` long, and whatever does not decode is
:class:`MalformedMessageError`, which a receiver counts and drops.

Only :class:`Hello` must stay decodable across versions: it carries the version in clear and everything else
as an opaque body, so that another version is refused by name rather than dropped as malformed.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias, Union

import msgspec
from msgspec import Meta, Struct

from afd_plugin.config import Role
from afd_plugin.control.fingerprint import Fingerprint
from afd_plugin.errors import ProtocolError
from afd_plugin.plan import StepKind, StepPlan

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024
"""Upper bound of one frame, in bytes, both ways; also the limit given to the sockets (ZMQ_MAXMSGSIZE)."""

MAX_TRACEBACK_LINES = 40
MAX_TEXT_CHARS = 4000

Index: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Tokens: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class MalformedMessageError(ProtocolError):
    """Bytes that are no message of this protocol version."""

    name = "malformed-message"
    mend = (
        "Find out who sends to the control port, and keep others away from it; the service drops such bytes."
    )


class MemberId(Struct, frozen=True, array_like=True, order=True):
    """One party of the control plane: the leader of an attention lane or of an FFN group."""

    role: Role
    index: Index

    def __str__(self) -> str:
        return f"attention lane {self.index}" if self.role is Role.ATTENTION else f"FFN group {self.index}"


class Member(Struct, frozen=True):
    """What the others learn about one party.

    Attributes:
        id: Which party this is.
        process: Where it runs, for messages to people: ``pid 4711 on host``.
        address: Where an FFN group leader takes STEP messages, ``host:port``; empty for attention.
        heartbeat_address: Where an FFN group leader takes heartbeats; empty for attention.
        data: Opaque strings: of an FFN group leader for example the address of its data plane, of an attention lane
            that comes again how far it has come.
    """

    id: MemberId
    process: str
    address: str = ""
    heartbeat_address: str = ""
    data: dict[str, str] = {}


class Introduction(Struct, frozen=True):
    """Body of :class:`Hello`: who knocks, and what it was started with."""

    member: Member
    fingerprint: Fingerprint


class Hello(Struct, frozen=True, tag="hello"):
    """A member knocks at the rendezvous host. ``body`` is an encoded :class:`Introduction`."""

    version: int
    body: bytes


class Progress(Struct, frozen=True, tag="progress"):
    """The host has admitted the receiver and still waits for ``missing``."""

    joined: tuple[str, ...]
    missing: tuple[str, ...]


class Welcome(Struct, frozen=True, tag="welcome"):
    """Everybody is here and agrees: the epoch of this life and the directory of all members."""

    epoch: Epoch
    members: tuple[Member, ...]


class Refuse(Struct, frozen=True, tag="refuse"):
    """The receiver (or the whole rendezvous) is refused.

    ``error`` is the ``name`` of a class in :mod:`afd_plugin.errors`; ``details`` the lines of a diff.
    """

    error: str
    message: str
    details: tuple[str, ...] = ()


class Attach(Struct, frozen=True, tag="attach"):
    """First message on every connection made after Welcome: which member of which life this is."""

    epoch: Epoch
    member: MemberId


class Attached(Struct, frozen=True, tag="attached"):
    """Answer to :class:`Attach`."""

    epoch: Epoch


class Ready(Struct, frozen=True, tag="ready"):
    """The sender has its weights and its data plane. ``data`` replaces or extends ``Member.data``."""

    epoch: Epoch
    data: dict[str, str] = {}


class Go(Struct, frozen=True, tag="go"):
    """Every member is ready. ``data`` holds the opaque strings of each FFN group, by group index."""

    epoch: Epoch
    data: tuple[dict[str, str], ...] = ()


class Step(Struct, frozen=True, tag="step"):
    """One forward pass is about to run: after the epoch, the fields of its :class:`StepPlan` in the same order.

    ``tokens[lane][stage]`` are for all lanes of the topology.

    ``resume`` is not 0 for a pass that an earlier life of the FFN began: the exchange to go on from.
    """

    epoch: Epoch
    step: Count
    kind: StepKind
    tokens: tuple[tuple[Tokens, ...], ...]
    graph: bool = False
    resume: Index = 0

    @classmethod
    def of(cls, epoch: int, plan: StepPlan) -> Step:
        """The message that announces ``plan`` in the life ``epoch``."""
        return cls(epoch, *plan)

    def plan(self) -> StepPlan:
        """The plan that this message announces."""
        return StepPlan(self.step, self.kind, self.tokens, self.graph, self.resume)


class Profile(Struct, frozen=True, tag="profile"):
    """Start or stop the FFN's profiler; the FFN serves inside one RPC, so this is the only way in."""

    start: bool
    prefix: str = ""
    epoch: Epoch = 0


class Drain(Struct, frozen=True, tag="drain"):
    """No new requests will come; steps of running requests still may, then :class:`Shutdown`."""

    epoch: Epoch = 0


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """The sender announces nothing any more."""

    epoch: Epoch = 0


class Abort(Struct, frozen=True, tag="abort"):
    """``origin`` has failed; every receiver passes it on to its other neighbours.

    ``error`` is the ``name`` of a class in :mod:`afd_plugin.errors`, or empty for any other exception.
    """

    epoch: Epoch
    origin: MemberId
    error: str
    reason: str
    traceback_tail: tuple[str, ...] = ()


class AbortSeen(Struct, frozen=True, tag="abort-seen"):
    """Answer to :class:`Abort`, so that its sender may end without losing it."""

    epoch: Epoch


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """The sender's process is alive; on the heartbeat channel, every ``heartbeat_interval_s``."""

    epoch: Epoch
    sequence: Count


class Farewell(Struct, frozen=True, tag="farewell"):
    """The sender is about to close its connections in good order: no failure."""

    epoch: Epoch


class FarewellSeen(Struct, frozen=True, tag="farewell-seen"):
    """Answer to :class:`Farewell`, so that its sender may close without losing it."""

    epoch: Epoch


Message: TypeAlias = Union[  # noqa: UP007 - a runtime value: msgspec reads it
    Hello,
    Progress,
    Welcome,
    Refuse,
    Attach,
    Attached,
    Ready,
    Go,
    Step,
    Profile,
    Drain,
    Shutdown,
    Abort,
    AbortSeen,
    Heartbeat,
    Farewell,
    FarewellSeen,
]

InBand: TypeAlias = Union[Step, Profile, Drain, Shutdown]  # noqa: UP007
"""What an attention lane sends to its FFN group between READY and the end, in order."""

_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_INTRODUCTIONS: msgspec.msgpack.Decoder[Introduction] = msgspec.msgpack.Decoder(Introduction)


def encode(message: Message) -> bytes:
    """Encode one message.

    Raises:
        ProtocolError: The frame would be longer than :data:`MAX_FRAME_BYTES`.
    """
    frame = _ENCODER.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"A {type(message).__name__} message is {len(frame)} bytes, over the limit of {MAX_FRAME_BYTES}."
        )
    return frame


def decode(frame: bytes) -> Message:
    """Decode one frame.

    Raises:
        MalformedMessageError: The bytes are no message of this protocol.
    """
    return _decode(_MESSAGES, frame)  # type: ignore[no-any-return]


def hello(introduction: Introduction) -> Hello:
    """The Hello of this protocol version."""
    return Hello(PROTOCOL_VERSION, _ENCODER.encode(introduction))


def introduction(message: Hello) -> Introduction:
    """The body of a Hello of this protocol version.

    Raises:
        MalformedMessageError: The body does not decode.
    """
    return _decode(_INTRODUCTIONS, message.body)  # type: ignore[no-any-return]


def clip_text(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """``text``, shortened so that it fits a message, with a mark where it was cut."""
    printable = re.sub(r"[^\x09\x0a\x20-\uffff]", "?", text)
    return printable if len(printable) <= limit else printable[:limit] + " [cut]"


def clip_traceback(lines: tuple[str, ...]) -> tuple[str, ...]:
    """The last :data:`MAX_TRACEBACK_LINES` lines, each shortened so that all fit a message."""
    return tuple(clip_text(line.rstrip("\n"), 400) for line in lines[-MAX_TRACEBACK_LINES:])


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        raise MalformedMessageError(f"A frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}.")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedMessageError(f"A frame of {len(frame)} bytes does not decode: {error}") from None
