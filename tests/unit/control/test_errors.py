# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import inspect

import pytest

from afd_plugin import errors
from afd_plugin.errors import AFDError, PeerAborted, by_name

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AFDError)]


def test_every_error_has_a_name_of_its_own() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)
    assert {by_name(name) for name in names} == set(KINDS)
    assert by_name("no-such-error") is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_exit_codes_tell_refusals_failures_and_timeouts_apart(kind: type[AFDError]) -> None:
    expected = 1
    if issubclass(kind, errors.Refused):
        expected = 2
    elif issubclass(kind, errors.PeerFailure | errors.ProtocolError):
        expected = 3
    elif issubclass(kind, errors.RendezvousTimeout):
        expected = 4
    assert kind.exit_code == expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_survive_a_process_boundary(kind: type[AFDError]) -> None:
    count = len(inspect.signature(kind).parameters)
    arguments = [f"argument {i}" if i < 2 else ("lines",) for i in range(count)]
    error = kind(*arguments)
    again = copy.copy(error)  # by the same protocol that multiprocessing uses
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert error.line().startswith(kind.name)


def test_an_abort_shows_the_remote_traceback() -> None:
    error = PeerAborted(
        "FFN group 0 failed: ValueError: boom", "ValueError: boom", ("  File x, line 3", "ValueError: boom")
    )
    assert "line 3" in str(error)
