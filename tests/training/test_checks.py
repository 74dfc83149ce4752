"""Configuration checks before ranks are started."""

from __future__ import annotations

import pytest

from spatialdl.errors import CheckpointError
from spatialdl.training.checks import check_config
from tests.composing import composed


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", 1),
        ("seed=0 trainer.clip_norm=0.1 trainer.ema=0 trainer.accumulate=1", 1),
        ("parallel=sp parallel.grid=[2,3]", 6),
        ("parallel=dp parallel.data=3 data.batch_size=3", 3),
        ("parallel=dp parallel.data=4 data.batch_size=4 trainer.accumulate=3", 4),
        ("data.mean=imagenet data.std=imagenet data.scale=200", 1),
        ("data.mean=[0,0.5] data.std=1 data.channels=2", 1),
        ("ckpt_path=latest", 1),
        ("weights=resnet50.pth", 1),  # which a hub may know
        ("parallel=dp parallel.shard_state=true optimizer=adamw", 2),
    ],
)
def test_what_fits(words, ranks):
    assert check_config(composed("train", words)).world_size == ranks


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        *(
            (f"seed={seed}", f"seed={said} must be a whole number")
            for seed, said in (("-1", "-1"), ("1.5", "1.5"), ("true", "True"), ("null", "None"))
        ),
        ("trainer.precision=half", "trainer.precision=half is not supported: use one of float32"),
        ("device=tpu", "device=tpu is not supported: use one of auto, cpu, cuda"),
        ("task.name=guessing", "task.name=guessing is not supported"),
        ("comm.transport=pigeon", "comm.transport=pigeon is not supported"),
        ("comm.backend=nothing", "use one of null, mpi4py, gloo, nccl"),
        ("parallel=lp parallel.balance=luck", "parallel.balance=luck is not supported"),
        ("comm.timeout=-1", "comm.timeout"),
        ("trainer.compile=true comm.timeout=60", "trainer.compile=true .* comm.timeout=60"),
        (
            "trainer.compile=true parallel=sp",
            r"compile=true cannot be combined with parallel.grid=\[2, 1",
        ),
        ("trainer.compile=yes", "trainer.compile=yes must be true or false"),
        *(
            (f"trainer.clip_norm={value}", "trainer.clip_norm=.* must be")
            for value in ("0", "-1", "much", "true", "nan")
        ),
        *(
            (f"trainer.ema={value}", "trainer.ema=.* must be at least 0 and below 1")
            for value in ("1", "-0.1", "true", "much", "nan")
        ),
        *(
            (f"trainer.accumulate={value}", "trainer.accumulate=.* must be")
            for value in ("0", "-2", "1.5", "null", "true")
        ),
        (
            "parallel=dp parallel.data=4 data.batch_size=3 trainer.accumulate=2",
            "data.batch_size=3 cannot be split into .* parallel.data=4: use at least 4 images",
        ),
        ("parallel=pp parallel.microbatches=8 data.batch_size=4", "batch"),
        ("parallel=sp+lp parallel.local_dp=2 data.batch_size=1", "batch"),
        ("parallel=sp parallel.grid=[65,1] data.image_size=[64,64]", "64"),
        ("data=shards data.path=nowhere", "data.path=nowhere is not a folder"),
        ("data=shards", r"data.path has no value: add data.path=\.\.\."),
        ("data=shards data.path=. data.targets=none.csv", "data.targets=none.csv is not a file"),
        ("data.std=0", r"data\.std=0 must be above 0"),
        ("data.mean=clip data.std=clip", r"data\.mean=clip is unknown: take imagenet"),
        ("data.mean=[0.1,0.2]", r"data\.mean has 2 numbers, \[0\.1,0\.2\], .* 3 channels"),
        ("data=shards data.path=. data.scale=nan", r"data\.scale=nan must be a number above 0"),
        ("weights=here/none.pth", "weights=here/none.pth: there is no such file"),
        ("trainer.checkpoint.best=luck", "trainer.checkpoint.best"),
        ("trainer.early_stopping.metric=luck", "trainer.early_stopping.metric"),
        *(
            (f"parallel=dp parallel.shard_state=true optimizer._target_=x.{name}", "whole weights")
            for name in ("LARS", "LAMB")
        ),
    ],
)
def test_what_does_not_fit_is_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_config(composed("train", words))


def test_a_checkpoint_that_is_not_there_is_refused():
    with pytest.raises(CheckpointError, match="ckpt_path=nowhere does not exist"):
        check_config(composed("train", "ckpt_path=nowhere"))
