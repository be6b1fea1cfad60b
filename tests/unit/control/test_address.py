# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from afd_plugin.control.address import Address
from afd_plugin.errors import AddressRefused


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7070", "127.0.0.1", 7070),
        ("localhost:0", "localhost", 0),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("ffn.example:80", "ffn.example", 80),
        ("*:80", "0.0.0.0", 80),
    ],
)
def test_addresses_are_parsed(text: str, host: str, port: int) -> None:
    assert Address.parse(text, "AFD_LISTEN") == Address(host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7070",
        "host",
        ":7070",
        "host:",
        "host:x",
        "host:70707",
        "host:-1",
        "::1:80",
        "tcp://h:1",
        "[::1]",
        "h:²",
    ],
)
def test_other_forms_are_refused_and_name_the_knob(text: str) -> None:
    with pytest.raises(AddressRefused, match="AFD_LISTEN") as refused:
        Address.parse(text, "AFD_LISTEN")
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1"])
def test_loopback_is_recognised(text: str) -> None:
    assert Address.parse(text, "").is_loopback
    assert Address.parse(str(Address.parse(text, "")), "") == Address.parse(text, "")


@pytest.mark.parametrize(
    "text", ["192.0.2.1:1", "[2001:db8::1]:1", "*:1", "[::]:1", "no-such-host.invalid:1"]
)
def test_everything_else_is_not_loopback(text: str) -> None:
    assert not Address.parse(text, "").is_loopback


def test_a_name_that_does_not_resolve_cannot_be_bound() -> None:
    with pytest.raises(AddressRefused, match="does not resolve"):
        Address.parse("no-such-host.invalid:1", "AFD_LISTEN").resolved("AFD_LISTEN")
