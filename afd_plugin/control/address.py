# SPDX-License-Identifier: Apache-2.0
"""Addresses of the control plane: ``host:port``, with IPv6 literals in brackets."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, replace

from afd_plugin.errors import AddressRefused

_WILDCARDS = {"*": "0.0.0.0", "0.0.0.0": "0.0.0.0", "::": "::"}  # noqa: S104 - recognised, not chosen


@dataclass(frozen=True)
class Address:
    """A host (name, IPv4 or IPv6 literal without brackets) and a port; port 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, knob: str) -> Address:
        """Parse ``host:port`` or ``[v6]:port``.

        Raises:
            AddressRefused: The text has another form; the message names ``knob``, where it came from.
        """
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise AddressRefused(
                f"{knob} is {text!r}; write an IPv6 address in brackets, for example [::1]:7070."
            )
        if not colon or not host or "/" in host:
            raise AddressRefused(f"{knob} is {text!r}; expected host:port, for example 127.0.0.1:7070.")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise AddressRefused(f"{knob} is {text!r}; expected a port from 0 to 65535 after the last colon.")
        return cls(_WILDCARDS.get(host, host), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """The form pyzmq takes."""
        return f"tcp://{self}"

    @property
    def is_wildcard(self) -> bool:
        """Whether the host means every interface, so that it cannot be dialled."""
        return self.host in _WILDCARDS.values()

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 literal, or a name that has IPv6 addresses only."""
        if ":" in self.host:
            return True
        families = {family for family, _ in _lookup(self.host)}
        return families == {socket.AF_INET6}

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the host; a name that does not resolve is not loopback."""
        found = [literal for _, literal in _lookup(self.host)]
        return bool(found) and all(ipaddress.ip_address(literal).is_loopback for literal in found)

    def resolved(self, knob: str) -> Address:
        """This address with a literal host, as binding needs it; IPv4 is preferred.

        Raises:
            AddressRefused: The name does not resolve.
        """
        found = sorted(_lookup(self.host), key=lambda item: item[0] is not socket.AF_INET)
        if not found:
            raise AddressRefused(
                f"{knob} names the host {self.host!r}, which does not resolve on this machine."
            )
        return replace(self, host=found[0][1])


def _lookup(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]
