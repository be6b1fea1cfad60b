# SPDX-License-Identifier: Apache-2.0
"""``GlooAFDConnector``: host memory over one stateless gloo group per FFN group.

Rank 0 is the FFN leader, rank 1 + i the group's i-th lane. The group is made by vLLM's
``stateless_init_torch_distributed_process_group``, so neither role's own default group is touched, and its store
listens on a socket that the FFN leader bound itself: the port is advertised, never derived.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # the built-in one only since Python 3.11
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.utils import stateless_init_torch_distributed_process_group

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import ConnectorShape
from afd_plugin.connectors.host import FFN_PEER, HostConnector
from afd_plugin.connectors.stream import listening
from afd_plugin.errors import PeerLost, RendezvousTimeout

_STORE_KEY = "gloo_store"


class GlooAFDConnector(HostConnector):
    """Blocking sends and receives over gloo, which hands each message to a thread of its own at both ends."""

    def __init__(self, shape: ConnectorShape, settings: LinkSettings) -> None:
        super().__init__(shape, settings)
        self._timeout = timedelta(seconds=settings.exchange_timeout_s)
        self._listener: socket.socket | None = None
        self._group: ProcessGroup | None = None

    def offer(self) -> dict[str, str]:
        self._listener, address = listening(self.settings)
        return {_STORE_KEY: address}

    def connect(self, data: Mapping[str, str]) -> None:
        host, port = data[_STORE_KEY].split()
        joined: Future[object] = Future()

        def join() -> None:
            try:
                joined.set_result(
                    stateless_init_torch_distributed_process_group(
                        host=host,
                        port=int(port),
                        rank=FFN_PEER if self.shape.lane is None else 1 + self.shape.lane,
                        world_size=1 + self.shape.lanes,
                        backend="gloo",
                        listen_socket=self._listener,
                    )
                )
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                joined.set_exception(error)

        # vLLM's call has no bound of ours, so it runs where its end is not waited for longer than that
        threading.Thread(target=join, name="afd-gloo", daemon=True).start()
        bound = self.settings.rendezvous_timeout_s
        try:
            group = joined.result(bound)
        except FutureTimeout:
            raise RendezvousTimeout(
                f"the gloo group of {1 + self.shape.lanes} ends did not form within {bound:g} s "
                "(AFD_RENDEZVOUS_TIMEOUT)."
            ) from None
        except RuntimeError as error:
            raise RendezvousTimeout(f"the gloo group did not form: {str(error).splitlines()[0]}") from error
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"vLLM returned {type(group)} for a stateless group")
        self._group = group

    def _transmit(self, message: torch.Tensor, peer: int) -> None:
        try:
            self._joined().send([message], peer, 0).wait(self._timeout)
        except RuntimeError as error:
            raise self._lost("send to", peer, error) from error

    def _collect(self, message: torch.Tensor, peer: int) -> None:
        try:
            self._joined().recv([message], peer, 0).wait(self._timeout)
        except RuntimeError as error:
            raise self._lost("receive from", peer, error) from error

    def _joined(self) -> ProcessGroup:
        if self._group is None:
            raise PeerLost("the data plane is closed; no exchange can run.")
        return self._group

    def _lost(self, action: str, peer: int, error: RuntimeError) -> PeerLost:
        first_line = str(error).splitlines()[0]
        return PeerLost(f"cannot {action} {self.peer_name(peer)}: {first_line}")

    def abort(self) -> None:
        """Mark the group unusable. gloo cannot interrupt a wait in progress: a dead peer's closed connection or the
        exchange timeout ends it, and the worker's failure guard ends the process if neither does in time."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
