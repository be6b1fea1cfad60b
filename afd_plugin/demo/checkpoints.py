# SPDX-License-Identifier: Apache-2.0
"""Makes the test checkpoints at first use and keeps them in a cache; never asks a model hub.

A checkpoint lies in `<cache>/<name>-<digest of its recipe>`. It is built in a temporary folder beside it
and renamed when complete, under a file lock, so two processes never see or make half a checkpoint.
"""

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afd_plugin.demo.recipes import BOS_ID, EOS_ID, PAD_ID, RECIPES, Recipe
from afd_plugin.demo.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch

CACHE_VARIABLE = "AFD_CHECKPOINT_DIR"
INDEX_NAME = "model.safetensors.index.json"


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where checkpoints are kept: `AFD_CHECKPOINT_DIR`, else under `XDG_CACHE_HOME`, else `~/.cache`."""
    env = os.environ if environment is None else environment
    if env.get(CACHE_VARIABLE):
        return Path(env[CACHE_VARIABLE])
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "afd-plugin" / "checkpoints"


def make(name: str, cache: Path | None = None) -> Path:
    """The folder of the checkpoint called `name`, made now if the cache has none. KeyError: unknown name."""
    return make_recipe(RECIPES[name], cache)


def make_all(cache: Path | None = None) -> dict[str, Path]:
    """Every checkpoint of `recipes.RECIPES` by name."""
    return {name: make(name, cache) for name in RECIPES}


def make_recipe(recipe: Recipe, cache: Path | None = None) -> Path:
    """The folder of `recipe`'s checkpoint, made now if the cache has none."""
    folder = (cache_folder() if cache is None else cache) / f"{recipe.name}-{recipe.digest}"
    return build_once(folder, lambda target: _write(recipe, target))


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build(temporary folder)` unless it already exists; atomic and locked."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return folder
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            build(temporary)
            temporary.chmod(0o755)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write(recipe: Recipe, folder: Path) -> None:
    from afd_plugin.demo.weights import draw, tensor_specs

    tensors = {spec.name: draw(spec, recipe.seed) for spec in tensor_specs(recipe)}
    _dump(folder / "config.json", dict(recipe.config))
    _dump(
        folder / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False},
    )
    write_tokenizer(folder, recipe.config["max_position_embeddings"])
    write_shards(folder, tensors, recipe.shards)


def write_shards(folder: Path, tensors: "Mapping[str, torch.Tensor]", shards: int) -> None:
    """Write `tensors` in their order as `shards` safetensors files of about equal size, with an index."""
    from safetensors.torch import save_file

    total = sum(tensor.nbytes for tensor in tensors.values())
    groups: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    written = 0
    for name, tensor in tensors.items():
        groups[min(written * shards // total, shards - 1)][name] = tensor
        written += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(group, folder / file_name, metadata={"format": "pt"})
        (folder / file_name).chmod(0o644)
        weight_map.update(dict.fromkeys(group, file_name))
    _dump(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the checkpoint's index."""
    index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
    mapping: dict[str, str] = index["weight_map"]
    return mapping


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of every tensor of a checkpoint by name, read from the file headers only."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    item_bytes = {"BF16": 2, "F16": 2, "F32": 4}
    for file_name in sorted(set(weight_map(folder).values())):
        with safe_open(folder / file_name, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                piece = handle.get_slice(name)
                count = 1
                for dimension in piece.get_shape():
                    count *= dimension
                sizes[name] = count * item_bytes[piece.get_dtype()]
    return sizes


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(names: list[str]) -> int:
    """`python -m afd_plugin.demo.checkpoints [NAME ...]`: make the named checkpoints, print their folders."""
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        sys.stderr.write(f"no checkpoint is called {unknown[0]!r}; known: {', '.join(RECIPES)}\n")
        return 2
    for name in names or list(RECIPES):
        sys.stdout.write(f"{make(name)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
