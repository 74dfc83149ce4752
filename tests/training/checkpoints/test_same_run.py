"""Settings that must match to resume, and logged ones; whole runs: test_checkpoints.py."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig

from spatialdl.data import ShardWriter
from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.same_run import check_same, identity, settings_of
from tests.composing import composed


def config(*words: str) -> DictConfig:
    return composed("train", *words)


def saved(now: DictConfig) -> dict[str, Any]:
    """As it comes out of a file."""
    content = {"step": 5, "identity": identity(now), "config": settings_of(now)}
    return json.loads(json.dumps(content))


OF_SHARDS = ("data.image_size=[8,8]", "data.channels=3", "data.num_classes=1")


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    for name, value in (("one", 1), ("two", 2)):
        with ShardWriter(tmp_path / name, ["a"]) as writer:
            writer.add(np.full((8, 8, 3), value, np.uint8), 0, "train")
    (tmp_path / "t.csv").write_text("slide,er\n0,1\n")
    return ["data=shards", f"data.path={tmp_path / 'one'}", *OF_SHARDS]


SYNTHETIC = (
    *("data.mean=0.4", "data.std=[0.25,0.25,0.2]", "data.scale=200"),
    *("seed=3", "task=multilabel", "data.batch_size=3", "data.image_size=[64,32]"),
    *("data.channels=1", "data.num_classes=4", "data.samples=33", "optimizer=adamw"),
)


@pytest.mark.parametrize("other", SYNTHETIC)
def test_other_samples_and_another_optimizer_are_refused(other):
    before = config()
    check_same(saved(before), before)
    for was, now in ((before, config(other)), (config(other), before)):
        with pytest.raises(CheckpointError, match=r"checkpoint of step 5 was .*use the same setti"):
            check_same(saved(was), now)


def test_other_shards_are_other_samples(shards, tmp_path):
    content = saved(config(*shards))
    check_same(content, config(*shards))
    for other in ("data.split=val", f"data.path={tmp_path / 'two'}"):
        with pytest.raises(CheckpointError, match="use the same setting"):
            check_same(content, config(*shards, other))
    targets = f"data.targets={tmp_path / 't.csv'}"
    with pytest.raises(CheckpointError, match=r"the file data\.targets=None"):
        check_same(content, config(*shards, targets))
    content = saved(config(*shards, targets))
    (tmp_path / "t.csv").write_text("slide,er\n0,0\n")
    with pytest.raises(CheckpointError, match=r"the file data\.targets="):
        check_same(content, config(*shards, targets))
    with pytest.raises(CheckpointError, match="was trained with data="):
        check_same(saved(config(*shards)), config(*OF_SHARDS))


def test_a_data_set_that_was_moved_is_the_same(shards, tmp_path, caplog):
    content = saved(config(*shards))
    (tmp_path / "one").rename(tmp_path / "moved")
    with caplog.at_level(logging.INFO):
        check_same(content, config(*shards, f"data.path={tmp_path / 'moved'}"))
    assert caplog.text == ""


def test_slices_of_batches_are_micro_batches_times_replicas(caplog):
    before = config("parallel=dp", "parallel.data=2", "parallel.microbatches=3")
    check_same(saved(before), config("parallel=dp", "parallel.data=3", "parallel.microbatches=2"))
    assert "slices" not in caplog.text
    check_same(saved(before), config("parallel=dp", "parallel.data=2", "parallel.microbatches=2"))
    assert "now split into 4 slices (parallel.microbatches x parallel.data), before into 6" in (
        caplog.text
    )


def test_changes_are_told_but_not_those_that_change_nothing(caplog):
    quiet = ("trainer.max_steps=77", "trainer.checkpoint.keep=9", "ckpt_path=latest")
    with caplog.at_level(logging.INFO):
        check_same(saved(config()), config(*quiet))
        assert caplog.text == ""
        check_same(saved(config()), config(*quiet, "optimizer.lr=0.5", "+optimizer.maximize=true"))
    (record,) = caplog.records
    told = record.getMessage().partition(": ")[2]
    assert told == "optimizer.lr=0.5 (was 0.05), optimizer.maximize=True (was None)"


def test_a_name_and_its_numbers_are_the_same_normalisation():
    named = config("data.mean=imagenet", "data.std=imagenet")
    mean, std = "data.mean=[0.485,0.456,0.406]", "data.std=[0.229,0.224,0.225]"
    check_same(saved(named), config(mean, std))
    check_same(saved(config("data.mean=[0.5,0.5,0.5]")), config())


def test_a_checkpoint_without_the_normalisation_has_the_default(caplog):
    before = saved(config())
    for key in ("mean", "std", "scale"):
        del before["identity"][f"data.{key}"], before["config"]["data"][key]
    with caplog.at_level(logging.INFO):
        check_same(before, config())
    assert caplog.text == ""
    with pytest.raises(CheckpointError, match=r"data\.std=\[0\.25, 0\.25, 0\.25\], but this"):
        check_same(before, config("data.mean=0.5", "data.std=0.3"))


def test_no_password_is_kept():
    found = settings_of(
        config("logger=mlflow", "logger.mlflow.tracking_uri=https://me:secret@host/x")
    )
    assert "secret" not in json.dumps(found)
