from __future__ import annotations

from contextlib import nullcontext

import pytest
from omegaconf import DictConfig, OmegaConf

from spatialdl.common.configuring.registered import NAMES
from spatialdl.layout.placement import Placement
from spatialdl.training.layouts import (
    check_batch,
    check_image,
    check_task,
    placement_of,
    schedule_of,
)
from tests.composing import composed


def parallel(words: str) -> DictConfig:
    """A layout by its name, and what keys of it are set to."""
    name, *keys = words.split()
    return composed("train", f"parallel={name}", *(f"parallel.{key}" for key in keys)).parallel


ONE = (1, 1)


@pytest.mark.parametrize("name", ["none", *NAMES])
def test_the_named_layouts_mean_these_ranks(name):
    parts, found = name.split("+"), parallel(name)
    first = (2, 1) if "sp" in parts else ONE
    stages = (first, ONE) if {"lp", "pp", "gems"} & {*parts} else (first,)
    placement = Placement(2 if "dp" in parts else 1, stages, mirrored="gems" in parts)
    assert (found.name, placement_of(found)) == (name, placement)
    assert schedule_of(found, placement).microbatches == found.microbatches
    check_batch(composed("train").data.batch_size, found.microbatches, placement)


SEVERAL = "sp+pp stages=4 spatial_stages=2 data=2"
DIVIDED = Placement(2, ((2, 2), (2, 2), ONE, ONE), batch=(1, 1, 3, 3))


@pytest.mark.parametrize(
    ("words", "dims", "placement"),
    [
        (f"{SEVERAL} grid=[2,3]", 2, Placement(2, ((2, 3), (2, 3), ONE, ONE))),
        (f"{SEVERAL} grid=[[2,2],[1,2]]", 2, Placement(2, ((2, 2), (1, 2), ONE, ONE))),
        (f"{SEVERAL} grid=[2,2] local_dp=3", 2, DIVIDED),
        # channels, in all stages or in some
        ("sp+pp tensor=3", 2, Placement(1, ((2, 1), ONE), tensor=(3, 3))),
        ("sp+pp tensor=[1,4]", 2, Placement(1, ((2, 1), ONE), tensor=(1, 4))),
        ("none tensor=[1]", 2, Placement(1, (ONE,))),
        # a number for each spatial dim
        ("none", 3, Placement(1, ((1, 1, 1),))),
        ("sp+pp grid=[1,2,2]", 3, Placement(1, ((1, 2, 2), (1, 1, 1)))),
        ("sp grid=[3]", 1, Placement(1, ((3,),))),
        # virtual tiles of each rank's part
        ("sp+pp stream=[2,1]", 2, Placement(1, ((2, 1), ONE), stream=(2, 1))),
        ("none stream=[4]", 2, Placement(1, (ONE,), stream=(4, 1))),
        ("none stream=[3]", 3, Placement(1, ((1, 1, 1),), stream=(3, 1, 1))),
        ("none stream=[3,1]", 1, Placement(1, ((1,),), stream=(3,))),
    ],
)
def test_numbers_can_be_changed(words, dims, placement):
    assert placement_of(parallel(words), dims) == placement


TWICE = "stages=4 interleave=2"
SHARDED = "shard_state=true"
WHOLE = "must be a whole number of at least"
GRID = r"grid must be \[rows,columns\], .* or a list .*, got"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("none grid=[]", rf"{GRID} \[\]"),
        ("none grid=2x1", f"{GRID} 2x1"),
        ("none grid=[2,2]", r"grid=\[2, 2\] splits images, but parallel=none has no spatial"),
        ("sp grid=[0,2]", r"grid=\[0, 2\] needs numbers of at least 1"),
        ("sp grid=[[2,1],3]", "2 grids, but .*spatial_stages=1: set"),
        ("sp+pp spatial_stages=2 grid=[[2,1],3]", f"parallel.{GRID} 3"),
        ("none spatial_stages=2", "spatial_stages=2 must lie between 0 and.*stages=1"),
        ("none spatial_stages=-1", f"spatial_stages {WHOLE} 0"),
        ("none microbatches=0", f"microbatches {WHOLE} 1, got 0"),
        ("none stages=two", f"parallel.stages {WHOLE} 1, got two"),
        ("none schedule=dualpipe", "unknown schedule dualpipe .*: take one of gpipe, 1f1b"),
        ("pp local_dp=2", r"spatial_stages=0 of parallel\.stages=2: use"),
        ("sp local_dp=2", r"local_dp=2 splits.*parallel\.data=2"),
        ("pp stages=5 interleave=2", "5 is not divisible by parallel.interleave=2: use 6 stages"),
        (f"sp+pp {TWICE}", "set parallel.spatial_stages=4 or 0, not 1"),
        (f"pp {TWICE}", "gpipe with parallel.interleave=2.* need parallel.schedule=interleaved, "),
        ("pp schedule=interleaved", "interleaved with.*interleave=1"),
        ("pp interleave=2 schedule=interleaved", "2 stages on one group of ranks has no other gr"),
        ("none gems.variant=mast", "1 stages on one group of ranks has no other group"),
        ("none gems.variant=huge", "variant=huge is unknown: use one of none, basic, mast, ma"),
        ("gems schedule=1f1b", "schedule=1f1b cannot be combined with GEMS"),
        ("none schedule=zero_bubble", "zero_bubble no longer .* use parallel.schedule=1f1b"),
        ("sp cut=[layer2]", r"cut=\['layer2'\] sets .* but parallel=sp has one stage: use paral"),
        (f"none {SHARDED}", r"shard_state=true cannot be combined with parallel\.data=1"),
        ("dp shard_state=2", "shard_state=2 must be true or false"),
        (f"dp+gems {SHARDED}", "shard_state=true .* with GEMS"),
        (
            f"dp+pp {SHARDED} {TWICE} schedule=interleaved",
            "true cannot be .* parallel.interleave=2",
        ),
        (f"dp+sp+pp {SHARDED} local_dp=2", "true cannot be combined with parallel.local_dp=2"),
        ("pp tensor=[2]", r"tensor=\[2\] has 1 numbers, .*stages=2"),
        ("gems tensor=[1,2]", "that share ranks .*GEMS.* one number for all"),
        ("none tensor_plan={fc:input}", "has no effect without split channels"),
        ("none tensor=2 tensor_plan={fc:rows}", "one of output, input, replicate, got rows"),
        ("gems microbatches=3", "a multiple of 2: parallel.microbatches=3 is not, take 4"),
        (
            "gems gems.variant=master microbatches=5",
            "2 times.*a multiple of 4: .*=5 is not, take 8",
        ),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(words, sentence):
    found = parallel(words)
    with pytest.raises(ValueError, match=sentence):
        schedule_of(found, placement_of(found))


ON_TILES = "dp stream=[1,1]"
PER_DIM = r"stream must be \[rows,columns\], or \[slices,rows,columns\] for volumes, got"
TOO_FEW = r"=\[2, 2\] has 2 numbers, but the images have 3 spatial dims: set .*=\[slices,rows,col"


@pytest.mark.parametrize(
    ("words", "dims", "sentence"),
    [
        ("sp grid=[1,2]", 3, r"grid=\[1, 2\] has 2 numbers, .* 3 spatial dims"),
        ("sp grid=[2,1,1]", 2, "has 3 numbers, one too many, .* images have 2"),
        ("none stream=4", 2, rf"{PER_DIM} 4$"),
        ("none stream=[2,2,2,2]", 2, rf"{PER_DIM} \[2, 2, 2, 2\]$"),
        ("none stream=[true,2]", 2, rf"{PER_DIM} \[True, 2\]$"),
        ("none stream=[2,0]", 2, r"parallel.stream=\[2, 0\] needs numbers of at least 1"),
        ("none stream=[2,2]", 3, TOO_FEW),
        ("none stream=[2,2]", 1, r"but the images have 1 spatial dims.*=\[positions\]"),
        ("none stream=[2,2] tensor=2", 2, "parallel.tensor=2 does not support virt"),
        ("sp+pp stream=[2,2] local_dp=2", 2, "local_dp=2 does not support virtual tiles"),
        (f"{ON_TILES} sync_batchnorm=true", 2, "sync_batchnorm=true does not support"),
        (f"{ON_TILES} {SHARDED}", 2, "shard_state=true does not support"),
    ],
)
def test_grids_and_virtual_tiles_that_cannot_be(words, dims, sentence):
    with pytest.raises(ValueError, match=sentence):
        placement_of(parallel(words), dims)


@pytest.mark.parametrize(
    ("placement", "fits", "sentence"),
    [
        (Placement(2, (ONE,)), 8, "=7 cannot be .*=4 x parallel.data=2: use at least 8"),
        (
            *(Placement(2, ((2, 1), ONE), batch=(1, 2)), 16),
            r"parallel\.data=2 x parallel\.local_dp=2: use at least 16",
        ),
    ],
)
def test_a_batch_must_reach_for_every_microbatch_of_every_replica(placement, fits, sentence):
    check_batch(fits, 4, placement)
    with pytest.raises(ValueError, match=sentence):
        check_batch(7, 4, placement)


CLASSES = {"name": "classification", "loss": None}
WEIGHED = {**CLASSES, "class_weights": [0.0, 1.0]}


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (CLASSES, ""),
        (WEIGHED, ""),
        ({"name": "segmentation", "loss": None}, r"segmentation does not support .*local_dp=2"),
        ({**WEIGHED, "label_smoothing": 0.1}, r"label_smoothing=0\.1 does not support"),
        ({**CLASSES, "loss": {"_target_": "my.Loss"}}, r"task\.loss=my\.Loss does not support"),
    ],
)
def test_ranks_that_divide_samples_need_labels_of_images(task, sentence):
    given = OmegaConf.create({"label_smoothing": 0.0, **task})
    check_task(given, Placement(1, ((2, 1), ONE)))
    divided = Placement(1, ((2, 1), ONE), batch=(1, 2))
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        check_task(given, divided)


@pytest.mark.parametrize(
    ("placement", "fits", "small", "sentence"),
    [
        (Placement(1, ((3, 3), ONE)), (3, 3), (2, 9), "2x9 is smaller than the grid 3x3"),
        (Placement(1, (ONE, (3, 3))), (3, 3), (9, 2), "9x2 is smaller than the grid 3x3"),
        (
            *(Placement(1, ((2, 1),), stream=(2, 3)), (4, 3), (3, 9)),
            "smaller than the 4x3 virtual tiles: use a smaller parallel.stream, parallel.gri",
        ),
        (Placement(1, ((2, 1),), stream=(2, 3)), (4, 3), (9, 2), "than the 4x3 virtual tiles"),
        (Placement(1, ((2, 1),)), (8, 8), (8, 8, 8), r"have 3 spatial dims, but .*grid has 2"),
    ],
)
def test_an_image_must_reach_for_every_part(placement, fits, small, sentence):
    check_image(fits, placement)
    with pytest.raises(ValueError, match=sentence):
        check_image(small, placement)
