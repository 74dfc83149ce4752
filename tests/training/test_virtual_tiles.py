from __future__ import annotations

import pytest
import torch

from spatialdl.training.checks import check_config
from spatialdl.training.virtual_tiles import memory_of
from tests.bags import bag_config, write_bags
from tests.composing import composed

STREAM = "parallel.stream=[2,2]"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "trainer.memory_limit_gb=0.5",
        "trainer.memory_limit_gb=2 parallel.stream_to=/tmp",
        "parallel=sp+pp parallel.recompute=block trainer.clip_norm=1 trainer.ema=0.9",
        "parallel=gems trainer.accumulate=2",
        "task=segmentation model=unet",
    ],
)
def test_what_goes_with_virtual_tiles(words):
    assert check_config(composed("train", f"{STREAM} {words}")).stream == (2, 2)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("trainer.compile=true", "trainer.compile=true"),
        ("task.mixup=0.2", "task.mixup=0.2"),
        ("debug.name=detect_nan", "debug=detect_nan"),
        ("task=survival task.loss=cox", "task.loss=cox"),
        ("parallel=dp parallel.sync_batchnorm=true", "parallel.sync_batchnorm=true"),
        ("parallel=dp parallel.shard_state=true", "parallel.shard_state=true"),
        ("parallel=pp parallel.schedule=zero_bubble", "parallel.schedule=zero_bubble"),
        ("parallel.tensor=2", "parallel.tensor=2"),
        ("parallel=sp+pp parallel.local_dp=2", "parallel.local_dp=2"),
    ],
)
def test_what_does_not_go_with_virtual_tiles(words, what):
    sentence = (
        rf"^{what} does not go with virtual tiles, parallel.stream=\[2, 2\]: leave one of the"
    )
    with pytest.raises(ValueError, match=sentence):
        check_config(composed("train", f"{STREAM} {words}"))


def test_bags_have_no_virtual_tiles(tmp_path):
    config = bag_config(write_bags(tmp_path))
    config.parallel.stream = [2]
    with pytest.raises(ValueError, match=r"parallel.stream=\[2\] takes images of one size"):
        check_config(config)


@pytest.mark.parametrize("words", ["parallel.stream_to=/tmp", "trainer.memory_limit_gb=2"])
def test_keys_of_virtual_tiles_are_of_no_use_without_any(words):
    with pytest.raises(ValueError, match=rf"^{words} is of no use without virtual tiles: set par"):
        check_config(composed("train", words))


def test_without_a_limit_nothing_is_stored():
    memory = memory_of(composed("train", STREAM), CPU)
    assert (memory._limit, memory._store) == (None, None)


def test_a_limit_is_in_gigabytes_and_the_store_where_it_is_said(tmp_path):
    words = f"{STREAM} trainer.memory_limit_gb=0.25"
    memory = memory_of(composed("train", f"{words} parallel.stream_to={tmp_path}"), CPU)
    assert memory._limit == 250_000_000
    assert memory._store.folder == tmp_path
    assert list(tmp_path.iterdir()) == []  # the file has no name
    assert memory_of(composed("train", words), CPU)._store.folder.is_dir()
    assert memory_of(composed("train", f"{STREAM} trainer.memory_limit_gb=3"), CPU)._limit == 3e9


@pytest.mark.parametrize("value", ["0", "-1", "true", "much", "nan", "[2]"])
def test_limits_that_are_none(value):
    words = f"{STREAM} trainer.memory_limit_gb={value}"
    with pytest.raises(ValueError, match=r"trainer.memory_limit_gb=.* must be a number above 0"):
        memory_of(composed("train", words), CPU)


def test_stores_that_cannot_be_used(tmp_path):
    words = f"{STREAM} parallel.stream_to={tmp_path}/nowhere"
    with pytest.raises(ValueError, match=r"nowhere is of no use without trainer.memory_limit_gb"):
        memory_of(composed("train", words), CPU)
    with pytest.raises(ValueError, match=r"cannot store tensors in .*nowhere: No such file"):
        memory_of(composed("train", f"{words} trainer.memory_limit_gb=1"), CPU)


def test_a_limit_is_for_a_cpu():
    words = f"{STREAM} trainer.memory_limit_gb=1"
    with pytest.raises(ValueError, match="is for networks on a CPU, this run is on cuda:0: leave"):
        memory_of(composed("train", words), torch.device("cuda:0"))
