# SPDX-License-Identifier: Apache-2.0
"""The trainer's network is the model that is served: on the tracked weights it agrees with transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qualify.accuracy import tasks, train
from qualify.accuracy.architectures import ARCHITECTURES, DEEPSEEK_V3, QWEN3_MOE, Architecture
from qualify.accuracy.checkpoints import FOLDER, RECORD, checked, digest, record
from qualify.accuracy.network import Batch, Network
from qualify.accuracy.tasks import Example, Task
from qualify.accuracy.train import Settings
from qualify.native_control import reference

EXAMPLES = tuple(tasks.held_out(7, Task.COPY, (4, 5), 12))
NAMED = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda item: item.name)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint's tensors."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@functools.cache
def _trained(name: str) -> Network:
    network = Network(ARCHITECTURES[name], 0)
    network.restore(tensors(checked(ARCHITECTURES[name])))
    return network.eval()


def trained(architecture: Architecture) -> Network:
    """The tracked checkpoint in the trainer's own network."""
    return _trained(architecture.name)


def one_row(examples: tuple[Example, ...]) -> Batch:
    """The examples one after the other in a single row."""
    return next(train.batches(iter(examples + EXAMPLES), 1, sum(len(e.text) + 1 for e in examples)))


@NAMED
def test_on_the_tracked_weights_the_network_computes_what_transformers_does(
    architecture: Architecture,
) -> None:
    """Router, experts, shared expert, attention, positions: every logit of an example, in float32."""
    ids, _ = train.encode(EXAMPLES[0])
    with torch.no_grad():
        mine, _ = trained(architecture)(one_row(EXAMPLES[:1]))
        theirs = reference(checked(architecture))(torch.tensor([ids])).logits
    assert mine.shape == theirs.shape
    assert (mine - theirs).abs().max().item() < 1e-3 * theirs.abs().max().item()


@NAMED
def test_an_example_sees_nothing_of_another_in_its_row(architecture: Architecture) -> None:
    """Packed or alone, its logits are the same; so training on packed rows is training on examples."""
    first, second = EXAMPLES[:2]
    begin = len(first.text) + 1
    with torch.no_grad():
        alone, _ = trained(architecture)(one_row((second,)))
        packed, _ = trained(architecture)(one_row((first, second)))
    assert torch.allclose(packed[0, begin:], alone[0], atol=1e-4 * alone.abs().max().item())


@NAMED
def test_what_is_exported_can_be_restored_and_a_missing_tensor_is_named(architecture: Architecture) -> None:
    """The tracked bytes come back; experts are taken apart and put together at the same places."""
    held = tensors(checked(architecture))
    exported = trained(architecture).exported()
    assert exported.keys() == held.keys()
    assert all(torch.equal(exported[name], held[name]) for name in held)
    lost = next(name for name in held if name.endswith("experts.3.down_proj.weight"))
    with pytest.raises(KeyError, match=lost):
        Network(architecture, 0).restore({name: t for name, t in held.items() if name != lost})


@NAMED
def test_a_tracked_model_scores_what_its_record_says_and_an_untrained_one_nothing(
    architecture: Architecture,
) -> None:
    """Held-out questions of the sizes that it has learned best and worst, judged by the whole answer."""
    scored = next(point["exact"] for point in reversed(record(architecture)["curve"]) if "exact" in point)
    seed = record(architecture)["settings"]["evaluation_seed"]
    for label in (max(scored, key=scored.get), min(scored, key=scored.get)):
        task, _, size = label.partition("-")
        rows = tasks.held_out(seed, Task(task), (int(size),), 40)
        assert train.exact(trained(architecture), rows, "cpu") == pytest.approx(scored[label], abs=0.15)
    assert train.exact(Network(architecture, 0).eval(), EXAMPLES, "cpu") == 0


def test_a_router_moves_its_bias_towards_even_use_and_one_without_a_bias_only_counts() -> None:
    """The overused expert's bias falls, the others' rise, and counting starts anew."""
    with_bias, without = (Network(architecture, 0).gates()[0] for architecture in (DEEPSEEK_V3, QWEN3_MOE))
    for gate in (with_bias, without):
        gate.counts.copy_(torch.tensor([8.0, 0, 0, 0, 0, 0, 0, 0]))
    before = with_bias.e_score_correction_bias.clone()
    with_bias.balance(0.5)
    without.balance(0.5)
    moved = with_bias.e_score_correction_bias - before
    assert torch.allclose(moved, torch.tensor([-0.5] + [0.5] * 7))
    assert with_bias.counts.sum() == without.counts.sum() == 0


def test_packed_rows_hold_whole_examples_and_mark_their_answers() -> None:
    """Positions start anew, nothing is cut, what does not fit opens the next row; padding belongs to no example."""
    batch = next(train.batches(iter(EXAMPLES), 2, 40))
    texts = []
    for row in range(2):
        for segment in range(int(batch.segments[row].max()) + 1):
            inside = batch.segments[row] == segment
            ids = batch.tokens[row][inside].tolist()
            assert batch.positions[row][inside].tolist() == list(range(len(ids)))
            texts.append(ids)
            example = EXAMPLES[len(texts) - 1]
            assert ids == train.encode(example)[0]
            answer = batch.tokens[row][inside & batch.answers[row]].tolist()
            assert answer == [train.IDS[character] for character in example.answer + tasks.END]
    assert len(texts) >= 4
    assert not batch.answers[batch.segments == -1].any()


def test_the_rate_rises_then_falls_and_no_gain_or_embedding_decays() -> None:
    """Warm-up to the full rate, a cosine to a fiftieth; MLA's wide projection learns by its own share."""
    settings = Settings(steps=1000, warm_up=100, rate=1.0, wide_scale=0.25)
    assert settings.rate_at(0) == 0.01
    assert settings.rate_at(99) == settings.rate_at(100) == 1.0
    assert settings.rate_at(1000) == pytest.approx(0.02)
    network = Network(DEEPSEEK_V3, 0)
    decayed, wide, others = train.groups(network, settings).param_groups
    assert (decayed["scale"], wide["scale"], others["weight_decay"]) == (1.0, 0.25, 0.0)
    assert len(wide["params"]) == DEEPSEEK_V3.config["num_hidden_layers"]
    assert any(parameter is network.embed_tokens for parameter in others["params"])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two steps on small rows; the evaluation of every task, a minute's work, is left out."""
    monkeypatch.setattr(train, "evaluate", lambda *_: {"left out": 0.0})
    monkeypatch.setattr(train, "usage", lambda *_: [])
    monkeypatch.setattr(Settings, "__init__", functools.partialmethod(Settings.__init__, rows=2, length=48))
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("short")
def test_the_same_command_trains_the_same_weights_and_its_record_names_every_file(tmp_path: Path) -> None:
    """Two runs are equal byte by byte; the record's digests are the files', and another rate is another model."""
    for name, rate in (("one", "0.003"), ("same", "0.003"), ("other", "0.001")):
        words = ["trained-qwen3-moe", "--steps", "2", "--every", "1", "--rate", rate]
        assert train.main([*words, "--output", str(tmp_path / name)]) == 0
    one, same, other = (train_record(tmp_path / name)["files"] for name in ("one", "same", "other"))
    assert one == same
    assert one != other
    assert all(digest(tmp_path / "one" / name) == wanted for name, wanted in one.items())
    assert len(train_record(tmp_path / "one")["curve"]) == 2


def train_record(folder: Path) -> dict[str, dict[str, str]]:
    """The record beside a checkpoint."""
    content: dict[str, dict[str, str]] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    return content


@pytest.mark.usefixtures("short")
def test_training_gives_up_at_its_limit_and_keeps_what_there_is(tmp_path: Path) -> None:
    """The error says how far it came; the unfinished checkpoint is no trained one."""
    with pytest.raises(TimeoutError, match="step 1 after"):
        train.train(QWEN3_MOE, Settings(steps=1), "cpu", 1, 0.0, tmp_path)
    assert train_record(tmp_path)["unfinished"] == 1
    assert not (FOLDER / tmp_path.name).exists()
