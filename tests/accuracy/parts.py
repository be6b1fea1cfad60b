# SPDX-License-Identifier: Apache-2.0
"""Copies of a checkpoint with only the routed or only the shared experts left."""

import enum
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


class Kept(enum.Enum):
    """Which experts still answer."""

    BOTH = "both"
    ROUTED = "routed"
    SHARED = "shared"


_SILENCED = {
    Kept.ROUTED: re.compile(r"\.shared_experts\.down_proj\.weight$"),
    Kept.SHARED: re.compile(r"\.experts\.\d+\.down_proj\.weight$"),
}


def only(kept: Kept, model: Path, folder: Path) -> Path:
    """A copy of `model` in `folder` whose other experts give zeros; the model itself for both."""
    if kept is Kept.BOTH:
        return model
    folder.mkdir(parents=True)
    for path in sorted(model.iterdir()):
        if path.suffix != ".safetensors":
            shutil.copy2(path, folder / path.name)
            continue
        tensors = {
            name: torch.zeros_like(tensor) if _SILENCED[kept].search(name) else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    return folder
