# SPDX-License-Identifier: Apache-2.0
"""Train one test model on the generated tasks: `python -m qualify.accuracy.train NAME --output FOLDER`.

Seeded throughout. The same command trains on a processor (one thread is enough) and, with `--device cuda`, on a
GPU; bits differ between devices and between versions of torch, so the checkpoint's own digest is what is pinned,
and the record says where it was made.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from afd_plugin.demo.checkpoints import write_shards
from afd_plugin.demo.recipes import BOS_ID, EOS_ID, PAD_ID
from afd_plugin.demo.tokenizer import vocabulary, write_tokenizer
from qualify.accuracy import tasks
from qualify.accuracy.architectures import ARCHITECTURES, Architecture
from qualify.accuracy.checkpoints import RECORD, digest
from qualify.accuracy.network import Batch, Network
from qualify.accuracy.tasks import Example, Task

IDS = {token: index for index, token in enumerate(vocabulary())}
SHARD_BYTES = 900_000


@dataclass(frozen=True)
class Settings:
    """How a model is trained; all of it stands in the record.

    `steps` is the length of the schedule; a `stop` before its end leaves a model that still makes mistakes.
    `wide_scale` is the share of the rate at which MLA's projection of 512 columns learns, four times as many as the
    others sum over; other models have no such projection.
    """

    steps: int = 2400
    stop: int = 0
    rows: int = 16
    length: int = 128
    rate: float = 3e-3
    warm_up: int = 200
    wide_scale: float = 0.25
    weight_decay: float = 0.05
    balance_loss: float = 0.01
    bias_rate: float = 0.001
    model_seed: int = 20260801
    data_seed: int = 20260802
    evaluation_seed: int = 20260803

    def rate_at(self, step: int) -> float:
        """The learning rate: a linear warm-up, then a cosine to a fiftieth."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def encode(example: Example) -> tuple[list[int], int]:
    """The token ids with the BOS, and the index of the answer's first token."""
    return [BOS_ID, *(IDS[character] for character in example.text)], len(example.question) + 1


def batches(examples: Iterator[Example], rows: int, length: int) -> Iterator[Batch]:
    """Examples packed into rows; one that does not fit begins the next row."""
    waiting: Example | None = None
    while True:
        tokens = torch.full((rows, length), PAD_ID)
        positions = torch.zeros(rows, length, dtype=torch.long)
        segments = torch.full((rows, length), -1)
        answers = torch.zeros(rows, length, dtype=torch.bool)
        for row in range(rows):
            used = segment = 0
            while True:
                example = waiting or next(examples)
                ids, start = encode(example)
                if used + len(ids) > length:
                    waiting = example
                    break
                waiting, end = None, used + len(ids)
                tokens[row, used:end] = torch.tensor(ids)
                positions[row, used:end] = torch.arange(len(ids))
                segments[row, used:end] = segment
                answers[row, used + start : end] = True
                used, segment = end, segment + 1
        yield Batch(tokens, positions, segments, answers)


def moved(batch: Batch, device: str) -> Batch:
    """The batch on `device`."""
    return Batch(
        *(part.to(device) for part in (batch.tokens, batch.positions, batch.segments, batch.answers))
    )


def loss_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens."""
    wanted = batch.answers[:, 1:]
    return F.cross_entropy(logits[:, :-1][wanted].float(), batch.tokens[:, 1:][wanted])


@torch.no_grad()
def exact(network: Network, examples: Sequence[Example], device: str) -> float:
    """Share of the examples whose whole answer is the most likely one, token by token."""
    right = 0
    for start in range(0, len(examples), 50):
        part = examples[start : start + 50]
        encoded = [encode(example) for example in part]
        length = max(len(ids) for ids, _ in encoded)
        tokens = torch.tensor([ids + [PAD_ID] * (length - len(ids)) for ids, _ in encoded])
        inside = torch.tensor([[index < len(ids) for index in range(length)] for ids, _ in encoded])
        marked = torch.tensor(
            [[begin <= index < len(ids) for index in range(length)] for ids, begin in encoded]
        )
        positions = torch.arange(length).expand(len(part), -1)
        batch = moved(Batch(tokens, positions, inside.long() - 1, marked), device)
        with torch.autocast(device, torch.bfloat16):
            logits, _ = network(batch)
        same = logits[:, :-1].argmax(-1) == batch.tokens[:, 1:]
        right += int((same | ~batch.answers[:, 1:]).all(-1).sum())
    return right / len(examples)


def evaluate(network: Network, settings: Settings, device: str, count: int = 40) -> dict[str, float]:
    """Exact answers by task and size, on held-out questions."""
    scores = {}
    for task, sizes in tasks.TRAINED.items():
        for size in sorted(set(sizes)):
            if (task, size) in TOO_FEW:
                continue
            rows = tasks.held_out(settings.evaluation_seed, task, (size,), count)
            scores[f"{task.value}-{size}"] = exact(network, rows, device)
    return scores


TOO_FEW = frozenset({(Task.ADD, 1), (Task.SORT, 2)})
"""Sizes with too few different questions to hold some out."""


def groups(network: Network, settings: Settings) -> torch.optim.Optimizer:
    """Adam; matrices decay, gains and the embedding do not; each group's rate is multiplied by its `scale`."""
    trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in trained if p.ndim > 1 and name != "embed_tokens"]
    wide = [p for name, p in matrices if "kv_b_proj" in name]
    decayed = [p for name, p in matrices if "kv_b_proj" not in name]
    others = [p for name, p in trained if p.ndim == 1 or name == "embed_tokens"]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay, "scale": 1.0},
            {"params": wide, "weight_decay": settings.weight_decay, "scale": settings.wide_scale},
            {"params": others, "weight_decay": 0.0, "scale": 1.0},
        ],
        lr=settings.rate,
        betas=(0.9, 0.98),
        fused=True,
    )


def train(
    architecture: Architecture, settings: Settings, device: str, every: int, minutes: float, folder: Path
) -> tuple[Network, dict[str, Any]]:
    """Train to the end of `settings.steps`; the network and its record. Past `minutes` it stops with an error.

    What there is so far is written to `folder` after each evaluation.
    """
    network = Network(architecture, settings.model_seed).to(device)
    optimizer = groups(network, settings)
    stream = batches(tasks.training(settings.data_seed), settings.rows, settings.length)
    curve: list[dict[str, Any]] = []
    started, recent = time.monotonic(), []
    last = settings.stop or settings.steps
    for step in range(last):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate_at(step) * group["scale"]
        batch = moved(next(stream), device)
        with torch.autocast(device, torch.bfloat16):
            logits, balance = network(batch)
        loss = loss_of(logits, batch)
        optimizer.zero_grad(set_to_none=True)
        (loss + settings.balance_loss * balance).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        for gate in network.gates():
            gate.balance(settings.bias_rate)
        recent.append(loss.item())
        if (step + 1) % every == 0 or step + 1 == last:
            spent = time.monotonic() - started
            point: dict[str, Any] = {"step": step + 1, "loss": round(sum(recent) / len(recent), 4)}
            if (step + 1) % (4 * every) == 0 or step + 1 == last:
                point |= {"exact": evaluate(network, settings, device)}
                write(network, {"unfinished": step + 1}, folder)
            curve.append(point)
            print(json.dumps({**point, "seconds": round(spent)}), flush=True)
            recent = []
            if spent > minutes * 60:
                raise TimeoutError(f"step {step + 1} after {spent:.0f} s; the limit is {minutes} minutes")
    return network, {"curve": curve, "seconds": round(time.monotonic() - started)}


@torch.no_grad()
def usage(network: Network, settings: Settings, device: str) -> list[list[float]]:
    """Each expert's share of the choices, layer by layer, on questions of the evaluation."""
    for gate in network.gates():
        gate.counts.zero_()
    for task, sizes in tasks.TRAINED.items():
        rows = tasks.held_out(settings.evaluation_seed, task, sizes[-3:], 200)
        exact(network, rows, device)
    return [[round(x, 4) for x in (gate.counts / gate.counts.sum()).tolist()] for gate in network.gates()]


def write(network: Network, record: dict[str, Any], folder: Path) -> None:
    """The checkpoint with tokenizer and record; files stay under `SHARD_BYTES` and a tensor's size."""
    folder.mkdir(parents=True, exist_ok=True)
    architecture, tensors = network.architecture, network.exported()
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_shards(folder, tensors, math.ceil(total / SHARD_BYTES))
    _dump(folder / "config.json", dict(architecture.config))
    _dump(
        folder / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False},
    )
    write_tokenizer(folder, architecture.config["max_position_embeddings"])
    files = {path.name: digest(path) for path in sorted(folder.glob("*")) if path.name != RECORD}
    _dump(folder / RECORD, {**record, "bytes": total, "files": files})


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def first_examples(settings: Settings, count: int = 2000) -> str:
    """Digest of the first `count` training examples: another generator or seed shows here."""
    stream = tasks.training(settings.data_seed)
    return tasks.digest([next(stream) for _ in range(count)])


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the checkpoint was written."""
    parser = argparse.ArgumentParser(prog="python -m qualify.accuracy.train", description=__doc__)
    parser.add_argument("name", choices=sorted(ARCHITECTURES))
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the checkpoint")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--stop", type=int, default=0, help="end after this many steps of the schedule")
    parser.add_argument("--wide-scale", type=float, default=Settings.wide_scale)
    parser.add_argument("--rate", type=float, default=Settings.rate)
    parser.add_argument("--every", type=int, default=100, help="steps between two points of the curve")
    parser.add_argument("--minutes", type=float, default=120.0, help="give up after this long")
    chosen = parser.parse_args(arguments)
    settings = Settings(steps=chosen.steps, stop=chosen.stop, rate=chosen.rate, wide_scale=chosen.wide_scale)
    torch.use_deterministic_algorithms(True, warn_only=True)
    network, seen = train(
        ARCHITECTURES[chosen.name], settings, chosen.device, chosen.every, chosen.minutes, chosen.output
    )
    record = {
        "name": chosen.name,
        "command": f"python -m qualify.accuracy.train {chosen.name} --steps {chosen.steps} --stop {chosen.stop} "
        f"--rate {chosen.rate} --wide-scale {chosen.wide_scale}",
        "settings": asdict(settings),
        "torch": torch.__version__,
        "device": chosen.device if chosen.device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "first_examples": first_examples(settings),
        "expert_usage": usage(network, settings, chosen.device),
        **seen,
    }
    write(network, record, chosen.output)
    print(f"{chosen.output}: {record['expert_usage']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
