# SPDX-License-Identifier: Apache-2.0
"""A tracked checkpoint is what was trained, small, uses its experts, and its record can be repeated."""

import shutil
from itertools import islice
from pathlib import Path

import pytest

from qualify.accuracy import tasks
from qualify.accuracy.architectures import ARCHITECTURES, Architecture
from qualify.accuracy.checkpoints import FOLDER, CheckpointAltered, all_checked, checked, record
from qualify.accuracy.gate import e2e_passed
from qualify.cells import load
from qualify.chain import Profile

LIMIT = 4 * 10**6


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda item: item.name)
def test_a_checkpoint_is_the_one_of_its_record(architecture: Architecture) -> None:
    folder = checked(architecture)
    assert sum(path.stat().st_size for path in folder.iterdir()) < LIMIT


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda item: item.name)
def test_every_expert_of_every_layer_is_used(architecture: Architecture) -> None:
    usage = record(architecture)["expert_usage"]
    assert len(usage) == len(architecture.moe_layers)
    for shares in usage:
        assert len(shares) == architecture.experts
        assert min(shares) > 0.25 / architecture.experts


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda item: item.name)
def test_the_data_that_it_was_trained_on_can_be_made_again(architecture: Architecture) -> None:
    content = record(architecture)
    stream = tasks.training(content["settings"]["data_seed"])
    assert tasks.digest(list(islice(stream, 2000))) == content["first_examples"]


def test_one_changed_byte_is_seen(tmp_path: Path) -> None:
    name, architecture = next(iter(ARCHITECTURES.items()))
    shutil.copytree(FOLDER / name, tmp_path / name)
    assert checked(architecture, tmp_path) == tmp_path / name
    victim = next((tmp_path / name).glob("*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    with pytest.raises(CheckpointAltered, match=victim.name):
        checked(architecture, tmp_path)
    victim.unlink()
    with pytest.raises(CheckpointAltered, match="its record names"):
        checked(architecture, tmp_path)


def test_a_missing_checkpoint_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointAltered, match=r"qualify\.accuracy\.train"):
        checked(next(iter(ARCHITECTURES.values())), tmp_path)


def test_both_families_are_there() -> None:
    assert set(all_checked()) == {"trained-deepseek-v3", "trained-qwen3-moe"}


def test_an_empty_ledger_has_no_end_to_end_gate() -> None:
    assert not e2e_passed(dict.fromkeys(Profile, ()), load("cpu"))
