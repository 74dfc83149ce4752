"""Copies of shards beside a run; the copier itself is tested in tests/data/staging."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from spatialdl.data import ShardWriter
from spatialdl.errors import ShardError
from spatialdl.training.staging import StageTo, Staging
from spatialdl.training.trainer import Trainer
from tests.data.conftest import flip
from tests.fitting import fit, make_trainer

GIVEN = (
    *("++model._target_=tests.training.checkpoints.runs.network", "~model.width", "data=shards"),
    *("data.batch_size=2", "trainer.max_steps=5", "trainer.precision=float64", "device=cpu"),
    *("trainer.checkpoint.keep=0", "trainer.report=false"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    with ShardWriter(tmp_path / "set", ("a", "b"), shard_size=2 * 32 * 32 * 3) as writer:
        for number in range(12):
            tile = draw.integers(0, 256, (32, 32, 3), np.uint8)
            writer.add(tile, number % 2, "train" if number < 8 else "val")
    return tmp_path / "set"


@pytest.fixture
def train(folder, tmp_path, caplog):
    """Train; return losses and log messages of the data layer."""

    def run(*words: str) -> tuple[list[float], list[str]]:
        caplog.clear()
        losses, step = [], Trainer._train_step
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO):
            patch.setattr(
                Trainer, "_train_step", lambda *given: losses.append(step(*given)) or losses[-1]
            )
            fit(make_trainer(*GIVEN, f"data.path={folder}", *words), tmp_path / "run")
        said = [one.message for one in caplog.records if one.name == "spatialdl.data"]
        return losses, said

    return run


@pytest.fixture
def steps(monkeypatch) -> list[Staging]:
    """Training waits at each step for the copier; the steps that it has begun."""
    damage, begun = Staging.damage, []

    def looking(staging: Staging) -> int:
        copier = staging._copier
        if copier is not None and copier._process.stdin is not None:
            while not copier.shards["done"] and copier._process.poll() is None:
                copier.look()
        begun.append(staging)
        return damage(staging)

    monkeypatch.setattr(Staging, "damage", looking)
    return begun


@pytest.mark.usefixtures("steps")
def test_training_is_the_same_with_copies(train, tmp_path):
    plain, said = train("data.stage.to=off")
    assert not said
    staged, said = train(f"data.stage.to={tmp_path}/disk")
    assert staged == plain
    start, end = said
    assert start.startswith("staging 6 shards (")
    assert f"to {tmp_path}/disk/.spatialdl-" in start
    assert end.startswith("staged: 6 shards (")
    assert end.endswith(") copied")
    assert not list((tmp_path / "disk").iterdir())
    kept, said = train(f"data.stage.to={tmp_path}/disk", "data.stage.keep=true")
    again, said = train(f"data.stage.to={tmp_path}/disk")
    assert kept == again == plain
    assert "6 shards" in said[-1]
    assert said[-1].endswith("reused from earlier jobs")
    (tmp_path / "file").write_text("")
    instead, [told] = train(f"data.stage.to={tmp_path}/file")  # a place that will not do
    assert instead == plain
    assert f"cannot stage to {tmp_path}/file: " in told


@pytest.mark.usefixtures("steps")
def test_only_what_is_read_is_copied(train, tmp_path):
    short = ("trainer.max_steps=1", "data.validation_split=null")
    _, said = train(f"data.stage.to={tmp_path}/disk", *short)
    assert said[0].startswith(("staging 1 shard (", "staging 2 shards ("))


def test_damage_ends_the_training_and_names_samples(train, folder, tmp_path, steps):
    flip(folder / "shard-00001.h5", -100)
    with pytest.raises(ShardError, match=r"shard-00001\.h5 has SHA-256 .* samples 2, 3$"):
        train(f"data.stage.to={tmp_path}/disk")
    assert len(steps) == 1
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", StageTo("off")),
        ("stage: {to: off}", StageTo("off")),
        ("stage: {to: null}", StageTo("off")),
        ("stage: {to: auto, keep: true}", StageTo("auto", True)),
        ("stage: {to: /scratch}", StageTo("/scratch")),
    ],
)
def test_settings(text, expected):
    assert StageTo.of(OmegaConf.create(text)) == expected


@pytest.mark.parametrize("text", ["stage: {to: 3}", "stage: {to: ''}", "stage: {keep: maybe}"])
def test_settings_that_do_not_fit(text):
    with pytest.raises(ValueError, match=r"data\.stage.* (is not supported: use|must be true)"):
        StageTo.of(OmegaConf.create(text))


def test_auto_takes_data_from_network_file_systems_to_a_disk(train, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    assert StageTo("auto").disk() == (tmp_path, "")
    assert StageTo("auto").is_for(Path("/proc"))  # nobody knows it to be of this machine
    assert not StageTo("auto").is_for(tmp_path)
    assert not StageTo("off").is_for(Path("/proc"))
    assert StageTo("/some/where").disk() == (Path("/some/where"), "")
    assert StageTo("/some/where").is_for(tmp_path)
    assert not train("trainer.max_steps=1")[1], "local data stay where they are"
    monkeypatch.setattr("spatialdl.training.staging.is_local", lambda path: False)
    _, said = train("trainer.max_steps=1")
    assert f"to {tmp_path}/.spatialdl-{os.getuid()} (" in said[0]
