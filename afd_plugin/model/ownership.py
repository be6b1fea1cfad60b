# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint tensors a built model owns, decided from the model itself.

A tensor's name is mapped by the model's own weight mapper, then followed along the module tree as far as it goes. It is
owned when the walk ends in a module this role built. Names alone decide nothing: placeholders do.
"""

from __future__ import annotations

from inspect import getattr_static

from torch import nn
from vllm.model_executor.models.utils import WeightsMapper

from afd_plugin.model.placeholders import is_missing
from afd_plugin.model.remote_runner import RemoteMoERunner


class Ownership:
    """The ownership filter of one built model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # A model class may or may not declare a mapper; the static look-up keeps placeholders out of it.
        mapper = getattr_static(type(model), "hf_to_vllm_mapper", None)
        self._mapper = mapper if isinstance(mapper, WeightsMapper) else None

    def owns(self, tensor_name: str) -> bool:
        """Whether the checkpoint tensor ``tensor_name`` belongs to a module that this process holds."""
        mapped = [tensor_name] if self._mapper is None else self._mapper.apply_list([tensor_name])
        return any(self._reaches_owned(name.split(".")) for name in mapped)

    def _reaches_owned(self, path: list[str]) -> bool:
        module = self._model
        for depth, part in enumerate(path):
            if is_missing(module) or isinstance(module, RemoteMoERunner):
                return False
            child = module._modules.get(part)
            if child is None:
                return self._keeps(module, path[depth:])
            module = child
        return False

    @staticmethod
    def _keeps(module: nn.Module, rest: list[str]) -> bool:
        if isinstance(module, nn.ModuleList):
            return False  # a layer that was not built, such as a draft model's
        if len(rest) == 1 and module._parameters.get(rest[0], module) is None:
            return False  # a parameter this role gave up
        return next(module.parameters(), None) is not None
