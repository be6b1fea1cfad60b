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
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.stream import listening
from afd_plugin.errors import ProtocolError, RendezvousTimeout

STORE_KEY = "store"
_DIGEST_CHARS = 64


class Meeting:
    """One FFN group's store. ``offer`` on the FFN, then ``join`` on both ends, then ``publish`` and
    ``collect``.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._timeout = timedelta(seconds=settings.rendezvous_timeout_s)
        self._listener: socket.socket | None = None
        self._store: TCPStore | None = None

    def offer(self) -> dict[str, str]:
        """Bind a listening socket beside the control plane's and return its address."""
        self._listener, address = listening(self._settings)
        return {STORE_KEY: address}

    def join(self, data: Mapping[str, str], members: int) -> TCPStore:
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
        return store

    def publish(self, name: str, document: Mapping[str, object]) -> None:
        """Let every member read ``document`` under ``name``."""
        body = json.dumps(document, sort_keys=True)
        self._joined().set(name, self._digest(name, body) + body)

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
        text = self._joined().get(name).decode()
        digest, body = text[:_DIGEST_CHARS], text[_DIGEST_CHARS:]
        if not hmac.compare_digest(digest, self._digest(name, body)):
            raise ProtocolError(f"what joined the data plane as {name} does not hold this service's token.")
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ProtocolError(f"{name} published {type(document).__name__}; a mapping was expected.")
        return document

    def _digest(self, name: str, body: str) -> str:
        key = self._settings.token.encode()
        return hmac.new(key, f"{name}\n{body}".encode(), hashlib.sha256).hexdigest()

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
