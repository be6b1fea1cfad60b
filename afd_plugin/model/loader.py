# SPDX-License-Identifier: Apache-2.0
"""Loaders that build a role's half and read only the tensors it owns.

A worker puts a :class:`RoleLoading` in place around vLLM's own ``load_model`` and sets ``load_format`` to the format of
the loader it wants; vLLM then constructs, loads and post-processes the model natively. Between construction and
reading, ``RoleLoading.before_weights`` runs: that is where the roles compare fingerprints.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from afd_plugin.errors import UnsupportedFeature
from afd_plugin.model.build import RoleBuild
from afd_plugin.model.ownership import Ownership
from afd_plugin.model.scan import HeldBytes, held_bytes

CHECKPOINT_FORMAT = "afd"
DUMMY_FORMAT = "afd_dummy"

_NATIVE_FORMATS = {
    "auto": CHECKPOINT_FORMAT,
    "hf": CHECKPOINT_FORMAT,
    "safetensors": CHECKPOINT_FORMAT,
    "dummy": DUMMY_FORMAT,
}


def role_load_format(native: str) -> str:
    """The role loader that serves vLLM's ``load_format``.

    Raises ``UnsupportedFeature`` for one that AFD cannot filter.
    """
    if native not in _NATIVE_FORMATS:
        raise UnsupportedFeature(
            f"--load-format {native} cannot be read per role; use one of {', '.join(sorted(_NATIVE_FORMATS))} "
            "with a safetensors checkpoint."
        )
    return _NATIVE_FORMATS[native]


@dataclasses.dataclass
class ReadRecord:
    """What a role read: tensor names per checkpoint file, and bytes."""

    tensors: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    skipped: int = 0
    bytes: int = 0

    def note(self, file: str, name: str, tensor: torch.Tensor) -> None:
        self.tensors.setdefault(file, []).append(name)
        self.bytes += tensor.numel() * tensor.element_size()


@dataclasses.dataclass
class RoleLoading:
    """One load of one role: the build scope, the hook between construction and reading, and what happened."""

    build: RoleBuild
    before_weights: Callable[[nn.Module], None]
    read: ReadRecord = dataclasses.field(default_factory=ReadRecord)
    held: HeldBytes | None = None
    _construction: ExitStack | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the loading that vLLM's loader factory will find, for the enclosed call."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Scope a native ``load_model``; the hooks end as soon as the model is built."""
        with self.build.construction() as stack:
            self._construction = stack
            yield

    def built(self, model: nn.Module) -> None:
        """The model stands, no weight is read: end the hooks, remove the rest, compare with the peers."""
        if self._construction is not None:
            self._construction.close()
        self.build.finish(model)
        self.before_weights(model)

    def loaded(self, model: nn.Module) -> None:
        """All weights are in place and not yet repacked by any kernel."""
        self.held = held_bytes(model)


_ACTIVE: ContextVar[RoleLoading] = ContextVar("afd_role_loading")


class AFDModelLoader(DefaultModelLoader):
    """Reads a safetensors checkpoint tensor by tensor, skipping what the role does not own before reading it."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))
        self.loading = _ACTIVE.get()
        self._ownership: Ownership | None = None

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        with self.loading.constructing():
            model: nn.Module = super().load_model(vllm_config, model_config, prefix)
            return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        self.loading.built(model)
        self._ownership = Ownership(model)
        super().load_weights(model, model_config)
        self.loading.loaded(model)

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        if self._ownership is None:
            raise RuntimeError("weights were requested before the model was built")
        _, files, _ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        for file in sorted(files):
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - safe_open is not a mapping
                    full_name = source.prefix + name
                    if not self._ownership.owns(full_name) or should_skip_weight(name, self.local_expert_ids):
                        self.loading.read.skipped += 1
                        continue
                    tensor = shard.get_tensor(name)
                    self.loading.read.note(Path(file).name, name, tensor)
                    yield full_name, tensor


class AFDDummyLoader(DummyModelLoader):
    """vLLM's random weights on a role's half; nothing is read."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.loading = _ACTIVE.get()

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        with self.loading.constructing():
            model: nn.Module = super().load_model(vllm_config, model_config, prefix)
            return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        self.loading.built(model)
        super().load_weights(model, model_config)
        self.loading.loaded(model)


def register_loaders() -> None:
    """Register both formats with vLLM; called by AFD workers only, so other processes keep the native table."""
    register_model_loader(CHECKPOINT_FORMAT)(AFDModelLoader)
    register_model_loader(DUMMY_FORMAT)(AFDDummyLoader)
