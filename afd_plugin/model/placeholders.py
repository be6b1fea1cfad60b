# SPDX-License-Identifier: Apache-2.0
"""Placeholders for modules that live in the other role's process.

They subclass vLLM's ``StageMissingLayer``, which ``AutoWeightsLoader`` and ``is_pp_missing_parameter`` skip natively,
and forward attribute reads to the dropped module, so that constructors which inspect a sibling keep working.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer

from afd_plugin.config import Role

RemoteCall = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""What a remote unit calls: hidden states [rows, hidden_size] and router logits or None, to the unit's output."""


class RoleStage(StageMissingLayer):
    """Stands where a module of ``owner`` stood; calling it is an error.

    ``quant_method`` is set to None because attribute reads are forwarded: ``process_weights_after_loading`` would find
    the dropped module's method and pack weights that are no longer there.
    """

    def __init__(self, owner: Role, module: nn.Module) -> None:
        super().__init__(owner.value, module)
        self.quant_method: object = None


class RemoteDense(RoleStage):
    """Stands in attention for a dense MLP that the FFN computes; its call is one exchange.

    :meth:`replacing` makes a class that also derives from the native one, since decoder layers test ``isinstance`` (in
    ``deepseek_v2`` for the scaling of float16).
    """

    def __init__(self, owner: Role, module: nn.Module) -> None:
        # Not super().__init__: in a class made by replacing() it would run the native constructor.
        nn.Module.__init__(self)
        self.stage_name = owner.value
        self.__dict__["module"] = module
        self.quant_method = None
        self._remote: RemoteCall | None = None

    @classmethod
    def replacing(cls, module: nn.Module) -> RemoteDense:
        """A remote stand-in for ``module``, whose memory is released."""
        module.to("meta")
        derived: type[RemoteDense] = type(f"Remote{type(module).__name__}", (cls, type(module)), {})
        return derived(Role.FFN, module)

    def bind(self, remote: RemoteCall) -> None:
        """Connect the unit to the data plane; called once, after the rendezvous."""
        self._remote = remote

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._remote is None:
            raise RuntimeError("a remote dense layer was called before the roles were connected")
        return self._remote(hidden_states, None)


def drop(owner: Role, module: nn.Module) -> RoleStage:
    """Release the memory of ``module`` and return its placeholder."""
    module.to("meta")
    return RoleStage(owner, module)


def is_missing(module: nn.Module) -> bool:
    """Whether ``module`` stands for something held elsewhere."""
    return isinstance(module, (StageMissingLayer, PPMissingLayer))
