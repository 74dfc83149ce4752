from __future__ import annotations

import re

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from spatialdl.configuring.values import _kinds, check_values


def composed(*overrides: str, command: str = "train") -> DictConfig:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return compose(command, list(overrides))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("comm.map=ture", "comm.map=ture must be true or false"),
        ("comm.check=null", "comm.check=null must be true or false"),
        ("parallel.sync_batchnorm=1", "parallel.sync_batchnorm=1 must be true or false"),
        ("data.samples=2.5", "data.samples=2.5 must be a whole number"),
        ("data.samples=true", "data.samples=true must be a whole number"),
        ("trainer.max_steps=1e3", "trainer.max_steps=1000.0 must be a whole number, or null"),
        ("trainer.clip_norm=on", "trainer.clip_norm=on must be a number, or null"),
        ("optimizer.lr=fast", "optimizer.lr=fast must be a number"),
        ("optimizer.lr=nan", "optimizer.lr=nan must be a number"),
        ("scheduler=cosine scheduler.T_max=[3]", "T_max=[3] must be a whole number, or null"),
        ("logger=tensorboard logger.tensorboard.images=no_", "images=no_ must be true or false"),
        ("model.width=wide", "model.width=wide must be a whole number"),
        ("task.mixup={a:1}", "task.mixup={'a': 1} must be a number"),
    ],
)
def test_what_is_no_switch_or_number_is_refused(override, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_values(composed(*override.split()))


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=1 comm.timeout=2.5 trainer.clip_norm=null trainer.max_epochs=3",
        "trainer.max_steps=${data.samples}",
        "seed=${hydra:job.num}",  # which cannot be told yet
        "++model._target_=mine.Network model.width=wide",
        "scheduler=one_cycle scheduler.div_factor=2.5 scheduler.max_lr=1",
        "data=shards data.num_classes=null",
        "model=unet model.depth=3",
        "parallel=lp parallel.tensor=[1,2]",  # was refused, as the default is a number
    ],
)
def test_what_is_one_passes(override):
    check_values(composed(*override.split()))


def test_each_command_has_its_own_keys():
    check_values(composed("ckpt_path=run", command="predict"))
    with pytest.raises(ValueError, match="maps=ture must be true or false"):
        check_values(composed("ckpt_path=run", "maps=ture", command="predict"))


def test_all_switches_are_known():
    kinds = _kinds()
    for key in ("comm.map", "comm.check", "trainer.tf32", "data.stage.keep", "overwrite"):
        assert kinds[key] == ("true or false",)
    assert kinds["comm.timeout"] == ("a number", "null")
    assert "parallel.grid" not in kinds
    assert "whole" not in kinds
