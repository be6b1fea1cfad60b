# SPDX-License-Identifier: Apache-2.0
"""A reserved port is ours until its user has bound it."""

from __future__ import annotations

import socket

import pytest
import zmq

from afd_plugin.errors import PortInUse
from afd_plugin.supervisor.ports import PortReservation, check_port_free, join_address


def test_a_reserved_port_can_be_bound_by_its_user_but_is_given_to_nobody_else() -> None:
    with PortReservation() as reserved:
        others = [PortReservation() for _ in range(20)]
        assert reserved.port not in {other.port for other in others}
        for other in others:
            other.close()
        context = zmq.Context()
        user = context.socket(zmq.ROUTER)
        user.bind(f"tcp://127.0.0.1:{reserved.port}")
        user.close(linger=0)
        context.term()


def test_a_port_with_a_listener_is_refused_by_name() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            check_port_free("127.0.0.1", port)
        with pytest.raises(PortInUse, match=str(port)):
            PortReservation("127.0.0.1", port)


def test_an_ipv6_address_is_bracketed() -> None:
    assert join_address("::1", 80) == "[::1]:80"
    assert join_address("127.0.0.1", 80) == "127.0.0.1:80"
