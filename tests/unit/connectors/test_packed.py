# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from afd_plugin.connectors.packed import Arena
from afd_plugin.errors import ProtocolError
from afd_plugin.plan import Exchange, MessageLayout

EXCHANGE = Exchange(step=5, unit=2, stage=1)


def filled(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(rows * width, dtype=torch.float32).view(rows, width).to(dtype)


@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_what_is_packed_comes_out_bit_for_bit(rows: int, logit_dtype: torch.dtype) -> None:
    layout = MessageLayout(hidden_size=6, itemsize=2, router_logits=3)
    sender, receiver = Arena(layout.size(8), torch.bfloat16), Arena(layout.size(8), torch.bfloat16)
    hidden, logits = filled(rows, 6), filled(rows, 3, logit_dtype)
    receiver.message(layout, rows).copy_(sender.pack(EXCHANGE, layout, hidden, logits))
    got_hidden, got_logits = receiver.unpack(EXCHANGE, layout, rows)
    assert torch.equal(got_hidden, hidden)
    assert got_logits is not None
    assert got_logits.dtype == logit_dtype
    assert torch.equal(got_logits, logits)


@pytest.mark.parametrize(
    "other",
    [Exchange(6, 2, 1), Exchange(5, 1, 1), Exchange(5, 2, 0)],
    ids=["step", "unit", "stage"],
)
def test_a_message_of_another_exchange_is_an_error(other: Exchange) -> None:
    layout = MessageLayout(6, 2)
    arena = Arena(layout.size(4), torch.bfloat16)
    arena.pack(EXCHANGE, layout, filled(4, 6))
    with pytest.raises(ProtocolError, match="was due"):
        arena.unpack(other, layout, 4)


def test_another_row_count_is_an_error() -> None:
    layout = MessageLayout(6, 2)
    arena = Arena(layout.size(4), torch.bfloat16)
    arena.pack(EXCHANGE, layout, filled(3, 6))
    with pytest.raises(ProtocolError, match="3 rows arrived"):
        arena.unpack(EXCHANGE, layout, 4)


@pytest.mark.parametrize("logits", [None, filled(3, 3), filled(4, 2)], ids=["none", "rows", "width"])
def test_router_logits_that_do_not_fit_are_an_error(logits: torch.Tensor | None) -> None:
    layout = MessageLayout(6, 2, router_logits=3)
    arena = Arena(layout.size(4), torch.bfloat16)
    with pytest.raises(ProtocolError, match="router logits"):
        arena.pack(EXCHANGE, layout, filled(4, 6), logits)


def test_router_logits_of_an_unknown_type_are_an_error() -> None:
    layout = MessageLayout(6, 2, router_logits=3)
    arena = Arena(layout.size(4), torch.bfloat16)
    with pytest.raises(ProtocolError, match="float64"):
        arena.pack(EXCHANGE, layout, filled(4, 6), filled(4, 3, torch.float64))
