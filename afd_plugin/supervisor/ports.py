# SPDX-License-Identifier: Apache-2.0
"""Free ports without a race: the port stays reserved until the process that will use it has bound it."""

from __future__ import annotations

import socket
from types import TracebackType

from afd_plugin.errors import PortInUse


def family_of(host: str) -> socket.AddressFamily:
    """AF_INET6 for a literal IPv6 address, else AF_INET."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class PortReservation:
    """A port of ``host`` that the system gave to us and to nobody else.

    The socket is bound with SO_REUSEADDR but never listens: Linux then hands the port to no other process
    by itself, while one that asks for exactly this port, also with SO_REUSEADDR (libzmq, uvicorn and
    torch's store do), may bind it. Hold the reservation until that process listens.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self._socket = socket.socket(family_of(host), socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise PortInUse(
                f"Address {host}:{port} cannot be bound ({error.strerror}); choose another host or port, "
                "or end the process that holds it."
            ) from None
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back; idempotent."""
        self._socket.close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_port_free(host: str, port: int) -> None:
    """Raise :class:`~afd_plugin.errors.PortInUse` unless a listener on ``host:port`` could start now."""
    with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise PortInUse(
                f"Port {port} on {host} is not free ({error.strerror}); choose another port, "
                "or end the process that holds it."
            ) from None


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
