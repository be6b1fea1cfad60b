# SPDX-License-Identifier: Apache-2.0
"""Where the ends of one data plane swap a few strings before the first exchange, over one store.

The FFN leader listens on a socket that it bound itself, and its address travels with the membership, so no
port is derived from another. Every document is authenticated with the pre-shared token; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.stream import listening
from afd_plugin.errors import ProtocolError, RendezvousTimeout

STORE_KEY = "store"
_DIGEST_CHARS = 64


class SealedStore(Store):
    """A store whose values carry the token's digest, for callers that unpickle what they read."""

    def __init__(self, store: Store, token: str) -> None:
        super().__init__()
        self._store = store
        self._token = token

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub knows text alone
        """Keep ``value``, sealed, under ``key``."""
        self._store.set(key, seal(self._token, key, value) + value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value under ``key``, once it is there; ``ProtocolError`` when no holder of the token wrote it."""
        return opened(self._token, key, self._store.get(key))


def seal(token: str, name: str, body: bytes) -> bytes:
    """The digest, in ASCII, that goes before ``body`` when it is kept under ``name``."""
    return hmac.new(token.encode(), name.encode() + b"\n" + body, hashlib.sha256).hexdigest().encode()


def opened(token: str, name: str, sealed: bytes) -> bytes:
    """What was sealed; ``ProtocolError`` when it was not sealed with ``token`` under ``name``."""
    digest, body = sealed[:_DIGEST_CHARS], sealed[_DIGEST_CHARS:]
    if not hmac.compare_digest(digest, seal(token, name, body)):
        raise ProtocolError(f"what joined the data plane as {name} does not hold this service's token.")
    return body


class Meeting:
    """One FFN group's store. ``offer`` on the FFN, then ``join`` on both ends, then ``publish`` and
    ``collect``, or ``gather``.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._timeout = timedelta(seconds=settings.rendezvous_timeout_s)
        self._listener: socket.socket | None = None
        self._hosts = False
        self._store: TCPStore | None = None

    def offer(self) -> dict[str, str]:
        """Bind a listening socket beside the control plane's and return its address."""
        self._listener, address = listening(self._settings)
        self._hosts = True
        return {STORE_KEY: address}

    def join(self, data: Mapping[str, str], members: int) -> None:
        """Open the store at the offered address; the FFN hosts it."""
        host, port = data[STORE_KEY].split()
        if self._listener is not None:
            listener, self._listener = self._listener, None
            store = TCPStore(
                host_name=host,
                port=int(port),
                world_size=members,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        else:
            store = TCPStore(
                host_name=host,
                port=int(port),
                world_size=members,
                is_master=False,
                timeout=self._timeout,
                wait_for_workers=False,
            )
        self._store = store

    def publish(self, name: str, document: Mapping[str, object]) -> None:
        """Let every member read ``document`` under ``name``."""
        self.sealed_store().set(name, json.dumps(document, sort_keys=True).encode())

    def collect(self, name: str) -> dict[str, object]:
        """The document that a member published under ``name``.

        Raises:
            RendezvousTimeout: it did not come in time.
            ProtocolError: it was not written by a holder of the token.
        """
        try:
            self._joined().wait([name], self._timeout)
        except RuntimeError:
            raise RendezvousTimeout(
                f"{name} did not join the data plane within {self._settings.rendezvous_timeout_s:g} s "
                "(AFD_RENDEZVOUS_TIMEOUT)."
            ) from None
        document = json.loads(self.sealed_store().get(name))
        if not isinstance(document, dict):
            raise ProtocolError(f"{name} published {type(document).__name__}; a mapping was expected.")
        return document

    def gather(
        self, name: str, names: Sequence[str], document: Mapping[str, object]
    ) -> list[dict[str, object]]:
        """Publish ``document`` under ``name`` and read everybody's, in the order of ``names``.

        The end that hosts the store returns when all have read all: when it then refuses what it read, and takes the
        store along, the others know what they refuse, too. Raises what :meth:`collect` does.
        """
        self.publish(name, document)
        documents = [self.collect(other) for other in names]
        self.publish(f"{name} has read", {})
        if self._hosts:
            for other in names:
                self.collect(f"{other} has read")
        return documents

    def sealed_store(self) -> SealedStore:
        """The store, for documents of the caller's own."""
        return SealedStore(self._joined(), self._settings.token)

    def _joined(self) -> TCPStore:
        if self._store is None:
            raise RuntimeError("the meeting has not begun or is over")
        return self._store

    def close(self) -> None:
        """Leave the store; the FFN's end stops listening."""
        self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
