from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from spatialdl.bench import slow_source
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardWriter
from spatialdl.errors import ShardError
from spatialdl.training.staging import StageTo, Staging
from spatialdl.training.trainer import Trainer
from tests.fitting import fit


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

    def run(*overrides: str) -> tuple[list[float], list[str]]:
        caplog.clear()
        with initialize_config_module("spatialdl.conf", version_base="1.3"):
            config = compose(
                "train",
                [
                    *("model.width=2", "data=shards", f"data.path={folder}", "device=cpu"),
                    *("data.batch_size=2", "trainer.max_steps=5", "trainer.precision=float64"),
                    "trainer.checkpoint.keep=0",
                    *("parallel=none", *overrides),
                ],
            )
        losses = []
        step = Trainer._train_step
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO):
            patch.setattr(
                Trainer, "_train_step", lambda *given: losses.append(step(*given)) or losses[-1]
            )
            fit(Trainer(config, SingleProcess()), tmp_path / "run")
        said = [one.message for one in caplog.records if one.name == "spatialdl.data"]
        return losses, said

    return run


def on_each_step(monkeypatch, do) -> None:
    damage = Staging.damage

    def looking(staging: Staging) -> int:
        do(staging)
        return damage(staging)

    monkeypatch.setattr(Staging, "damage", looking)


def until_done(staging: Staging) -> None:
    """Let training wait for the copier."""
    if staging._copier is not None and staging._copier._process.stdin is not None:
        while not staging._copier.shards["done"] and staging._copier._process.poll() is None:
            staging._copier.look()


def test_training_is_the_same_with_copies(train, tmp_path, monkeypatch):
    plain, said = train("data.stage.to=off")
    assert not said
    on_each_step(monkeypatch, until_done)
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


def test_auto_leaves_local_data_where_they_are(train):
    assert not train("trainer.max_steps=1")[1]


def test_only_what_is_read_is_copied(train, tmp_path, monkeypatch):
    on_each_step(monkeypatch, until_done)
    _, said = train(
        *(f"data.stage.to={tmp_path}/disk", "trainer.max_steps=1", "data.validation_split=null")
    )
    assert said[0].startswith(("staging 1 shard (", "staging 2 shards ("))


def test_damage_ends_the_training_and_names_samples(train, folder, tmp_path, monkeypatch):
    path = folder / "shard-00001.h5"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    steps = []
    on_each_step(monkeypatch, lambda staging: until_done(staging) or steps.append(staging))
    with pytest.raises(ShardError, match=r"shard-00001\.h5 has SHA-256 .* samples 2, 3$"):
        train(f"data.stage.to={tmp_path}/disk")
    assert len(steps) == 1
    assert not list((tmp_path / "disk").iterdir())


def test_a_killed_copier_does_not_end_the_training(train, tmp_path, monkeypatch):
    def kill(staging: Staging) -> None:
        if staging._copier is not None and staging._copier._process.poll() is None:
            os.kill(staging._copier._process.pid, signal.SIGKILL)
            staging._copier._process.wait()

    plain, _ = train("data.stage.to=off")
    on_each_step(monkeypatch, kill)
    staged, said = train(f"data.stage.to={tmp_path}/disk")
    assert staged == plain
    assert sum("was killed (SIGKILL)" in one for one in said) == 1
    assert not list((tmp_path / "disk").iterdir())


def test_training_reads_from_a_slow_source_what_has_not_arrived(
    train, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("spatialdl.data.staging.process._SLOW_AFTER_S", 0.1)
    plain, _ = train("data.stage.to=off")
    (tmp_path / "slow").mkdir()
    _, variables = slow_source.environment(folder, 25_000, tmp_path / "slow")
    for name, value in variables.items():  # of the copier
        monkeypatch.setenv(name, value)
    staged, said = train(f"data.stage.to={tmp_path}/disk")
    assert staged == plain
    [told] = [one for one in said if "copying is slow or has stalled" in one]
    assert f"are read from {folder}" in told


def test_a_place_that_will_not_do_is_said(train, tmp_path):
    (tmp_path / "file").write_text("")
    plain, _ = train("data.stage.to=off")
    staged, said = train(f"data.stage.to={tmp_path}/file")
    assert staged == plain
    [told] = said
    assert f"cannot stage to {tmp_path}/file: " in told


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
    monkeypatch.setattr("spatialdl.training.staging.is_local", lambda path: False)
    _, said = train("trainer.max_steps=1")
    assert f"to {tmp_path}/.spatialdl-{os.getuid()} (" in said[0]
