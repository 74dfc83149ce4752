"""Configuration checks before ranks are started."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardWriter
from spatialdl.errors import CheckpointError
from spatialdl.training.checks import check_config, check_stored_size, common_size
from tests.composing import composed
from tests.fitting import make_parts


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
    assert check_config(composed("train", *words.split())).world_size == ranks


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("seed=-1", "seed=-1 must be a whole number"),
        ("trainer.precision=half", "trainer.precision=half is not supported: use one of float32"),
        ("comm.backend=nothing", "use one of null, mpi4py, gloo, nccl"),
        ("comm.backend=gloo", "chooses what parallel.shard_state=true shards over"),
        ("comm.timeout=-1", "comm.timeout"),
        *((f"trainer.clip_norm={n}", "clip_norm=.* must be") for n in ("0", "much", "true", "nan")),
        *((f"trainer.ema={n}", "ema=.* must be at least 0") for n in ("1", "-0.1", "true", "nan")),
        *((f"trainer.accumulate={n}", "accumulate=.* must be") for n in ("0", "1.5", "true")),
        (
            "parallel=dp parallel.data=4 data.batch_size=3 trainer.accumulate=2",
            "data.batch_size=3 cannot be split into .* parallel.data=4: use at least 4 images",
        ),
        ("parallel=sp+lp parallel.local_dp=2 data.batch_size=1", "batch"),
        ("parallel=sp parallel.grid=[65,1] data.image_size=[64,64]", "64"),
        ("data=shards data.path=nowhere", "data.path=nowhere is not a folder"),
        ("data=shards", r"data.path has no value: add data.path=\.\.\."),
        ("data=shards data.path=. data.targets=none.csv", "data.targets=none.csv is not a file"),
        ("data.mean=clip data.std=clip", r"data\.mean=clip is unknown: take imagenet"),
        ("data.mean=[0.1,0.2]", r"data\.mean has 2 numbers, \[0\.1,0\.2\], .* 3 channels"),
        ("data=shards data.path=. data.scale=nan", r"data\.scale=nan must be a number above 0"),
        ("weights=here/none.pth", "weights=here/none.pth: there is no such file"),
        ("trainer.validate_every=0", "validate_every=0 must be at least 1 step, or null"),
        ("trainer.checkpoint.every_steps=1.5", "every_steps=1.5 must be at least 1 step, or"),
        ("trainer.checkpoint.keep=-1", "keep=-1 must be at least 0 checkpoints"),
        ("trainer.early_stopping.patience=0", "patience=0 must be at least 1 validation"),
        ("trainer.checkpoint.best=luck", "trainer.checkpoint.best"),
        ("parallel=dp parallel.shard_state=true optimizer._target_=x.LARS", "whole weights"),
        ("ckpt_path=nowhere", "ckpt_path=nowhere does not exist"),
    ],
)
def test_what_does_not_fit_is_refused(words, sentence):
    with pytest.raises((ValueError, CheckpointError), match=sentence):
        check_config(composed("train", *words.split()))


TINY = [
    *("model.width=2", "data.image_size=[40,36]", "data.num_classes=3", "data.samples=10"),
    *("data.validation_samples=5", "data.batch_size=4", "trainer.max_steps=3", "device=cpu"),
]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.batch_size=3", "parallel.microbatches=4"], "batch_size=3 cannot be split"),
        (["trainer.max_steps=0"], "max_steps=0 and trainer.max_epochs=None leave no step"),
        (["trainer.max_steps=null"], "leave no step to train"),
        (["++model._target_=builtins.dict"], "model=builtins.dict creates a dict, expected"),
        (["++model._target_=spatialdl.models.nothing"], "nothing cannot be imported: .* no attr"),
        (
            ["data.validation_samples=0", "trainer.early_stopping.metric=loss"],
            "early_stopping.metric=loss needs validation samples, but there are none",
        ),
        (["++model.depth=7"], "model=spatialdl.models.resnet18 cannot be built.*depth"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(overrides, sentence):
    with pytest.raises(ValueError, match=f"(?s){sentence}"):
        make_parts(*TINY, *overrides)


def written(folder: Path, *sizes: tuple[int, int, str]) -> str:
    with ShardWriter(folder, kind="regions", classes=["a"]) as writer:
        for rows, cols, split in sizes:
            writer.add(np.zeros((rows, cols, 3), np.uint8), 0, split=split)
    return f"data=shards data.path={folder}"


def checked(*words: str) -> None:
    config = composed("train", *" ".join(words).split())
    check_config(config)
    check_stored_size(config.data, config.parallel)


def test_sizes() -> None:
    assert common_size(Path("set"), [(3, 4), (3, 4)]) == (3, 4)
    with pytest.raises(ValueError, match=r"have 4 different sizes, such as 1 x 4, 2 x 4, 3 x 4"):
        common_size(Path("set"), [(3, 4), (1, 4), (3, 5), (2, 4)])
    with pytest.raises(ValueError, match=r"data\.image_size=\[slices,rows,columns\]"):
        common_size(Path("set"), [(3, 4, 5), (3, 4, 6)])


def test_regions_of_several_sizes_or_fewer_rows_than_the_grid_are_refused(tmp_path: Path) -> None:
    words = written(tmp_path / "set", (70, 60, "train"), (70, 60, "val"), (90, 60, "test"))
    checked(words, "parallel=sp")
    for more in ("data.split=null", "data.split=test"):
        with pytest.raises(ValueError, match="have 2 different sizes, such as 70 x 60, 90 x 60"):
            checked(words, more, "parallel=sp")
    checked(words, "data.split=test data.validation_split=null")
    checked(words, "data.split=null data.image_size=[64,64]")
    checked(words, "data.split=none data.validation_split=null")
    with pytest.raises(ValueError, match="90"):  # which the grid cannot divide
        checked(words, "data.split=test parallel=sp parallel.grid=[91,1]")
