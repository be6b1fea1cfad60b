# SPDX-License-Identifier: Apache-2.0
"""``TcpAFDConnector``: the CPU lane's connector, one TCP connection between the FFN leader and each lane.

The leader listens on a port of its own until every lane has come and proven that it holds the service's token; the
address and the name of this life of the service travel with the membership. Nothing listens afterwards.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping

import torch

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import ConnectorShape
from afd_plugin.connectors.host import FFN_PEER, HostConnector
from afd_plugin.connectors.stream import Stream, listening
from afd_plugin.errors import PeerLost, ProtocolError, RendezvousTimeout

_ADDRESS_KEY = "tcp"
_LIFE_KEY = "tcp_life"


class TcpAFDConnector(HostConnector):
    """Sends and receives on the calling thread; ``abort`` ends a wait at once."""

    def __init__(self, shape: ConnectorShape, settings: LinkSettings) -> None:
        super().__init__(shape, settings)
        self._listener: socket.socket | None = None
        self._life = ""
        self._streams: dict[int, Stream] = {}

    def offer(self) -> dict[str, str]:
        self._listener, address = listening(self.settings)
        self._life = secrets.token_hex(8)
        return {_ADDRESS_KEY: address, _LIFE_KEY: self._life}

    def connect(self, data: Mapping[str, str]) -> None:
        if self.shape.lane is None:
            self._accept()
        else:
            self._call(data, self.shape.lane)

    def _call(self, data: Mapping[str, str], lane: int) -> None:
        host, port = data[_ADDRESS_KEY].split()
        try:
            connection = socket.create_connection((host, int(port)), self.settings.rendezvous_timeout_s)
        except OSError as error:
            raise RendezvousTimeout(
                f"the data plane of the FFN at {host} port {port} cannot be reached: {error}"
            ) from error
        stream = self._stream(connection, self.peer_name(FFN_PEER))
        self._streams[FFN_PEER] = stream
        stream.introduce(self.settings.token, data[_LIFE_KEY], lane, self.settings.rendezvous_timeout_s)

    def _accept(self) -> None:
        if self._listener is None:
            raise ProtocolError("connect came before offer; nothing listens on the data plane.")
        deadline = time.monotonic() + self.settings.rendezvous_timeout_s
        while len(self._streams) < self.shape.lanes:
            try:
                # callers who are not wanted do not extend the wait
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                self._listener.settimeout(left)
                connection, _ = self._listener.accept()
            except TimeoutError:
                missing = [lane for lane in range(self.shape.lanes) if 1 + lane not in self._streams]
                raise RendezvousTimeout(
                    f"lanes {missing} did not join the data plane within "
                    f"{self.settings.rendezvous_timeout_s:g} s (AFD_RENDEZVOUS_TIMEOUT)."
                ) from None
            self._admit(self._stream(connection, "a caller on the data plane"))
        self._listener.close()
        self._listener = None

    def _admit(self, stream: Stream) -> None:
        """Keep the caller if it is a lane that is still missing; a stranger is sent away and the wait goes on."""
        try:
            lane = stream.identify(self.settings.token, self._life)
        except (PeerLost, ProtocolError):
            stream.close()
            return
        if lane not in range(self.shape.lanes) or 1 + lane in self._streams:
            stream.close()
            return
        self._streams[1 + lane] = stream

    def _stream(self, connection: socket.socket, peer: str) -> Stream:
        return Stream(
            connection,
            peer,
            timeout_s=self.settings.exchange_timeout_s,
            failure_timeout_s=self.settings.failure_timeout_s,
            backlog_bytes=self.shape.stages * self.shape.arena_bytes,
        )

    def _transmit(self, message: torch.Tensor, peer: int) -> None:
        self._to(peer).send(message.numpy().data)

    def _collect(self, message: torch.Tensor, peer: int) -> None:
        self._to(peer).receive(message.numpy().data)

    def _to(self, peer: int) -> Stream:
        try:
            return self._streams[peer]
        except KeyError:
            raise PeerLost("the data plane is closed; no exchange can run.") from None

    def abort(self) -> None:
        for stream in list(self._streams.values()):
            stream.abort()

    def close(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
