from __future__ import annotations

import subprocess
import sys
from importlib import resources

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from spatialdl.parallel.placement import Placement
from spatialdl.training.layouts import (
    check_batch,
    check_image,
    check_task,
    placement_of,
    schedule_of,
)


def config(*overrides: str) -> DictConfig:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return compose("train", list(overrides))


ONE = (1, 1)
SHIPPED = {
    "none": Placement(1, (ONE,)),
    "dp": Placement(2, (ONE,)),
    "sp": Placement(1, ((2, 1),)),
    "lp": Placement(1, (ONE, ONE)),
    "pp": Placement(1, (ONE, ONE)),
    "sp+lp": Placement(1, ((2, 1), ONE)),
    "sp+pp": Placement(1, ((2, 1), ONE)),
    "dp+sp": Placement(2, ((2, 1),)),
    "dp+lp": Placement(2, (ONE, ONE)),
    "dp+pp": Placement(2, (ONE, ONE)),
    "dp+sp+lp": Placement(2, ((2, 1), ONE)),
    "dp+sp+pp": Placement(2, ((2, 1), ONE)),
    "gems": Placement(1, (ONE, ONE), mirrored=True),
    "sp+gems": Placement(1, ((2, 1), ONE), mirrored=True),
    "dp+gems": Placement(2, (ONE, ONE), mirrored=True),
    "dp+sp+gems": Placement(2, ((2, 1), ONE), mirrored=True),
}


@pytest.mark.parametrize(("name", "placement"), SHIPPED.items())
def test_the_shipped_layouts_mean_these_ranks(name, placement):
    parallel = config(f"parallel={name}").parallel
    assert (parallel.name, placement_of(parallel)) == (name, placement)
    assert schedule_of(parallel, placement).microbatches == parallel.microbatches
    check_batch(config().data.batch_size, parallel.microbatches, placement)


@pytest.mark.parametrize("name", ["none", "dp", "sp", "pp", "sp+pp", "dp+pp", "dp+sp+pp"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_pipelines_take_these_schedules(name, schedule):
    parallel = config(f"parallel={name}", f"parallel.schedule={schedule}").parallel
    train = schedule_of(parallel, placement_of(parallel)).train
    kinds = {action.kind for actions in train for action in actions}
    assert ("weight" in kinds) == (schedule == "zero_bubble")


def test_every_shipped_layout_is_in_the_table():
    files = resources.files("spatialdl.conf").joinpath("parallel").iterdir()
    names = [file.name.removesuffix(".yaml") for file in files if file.is_file()]
    assert sorted([*SHIPPED, "auto"]) == sorted(names)


def test_numbers_can_be_changed():
    parallel = config(
        "parallel=sp+pp",
        "parallel.grid=[2,3]",
        "parallel.stages=4",
        "parallel.spatial_stages=2",
        "parallel.data=2",
    ).parallel
    assert placement_of(parallel) == Placement(2, ((2, 3), (2, 3), ONE, ONE))
    parallel.grid = [[2, 2], [1, 2]]
    assert placement_of(parallel) == Placement(2, ((2, 2), (1, 2), ONE, ONE))
    parallel.local_dp = 3
    expected = Placement(2, ((2, 2), (1, 2), ONE, ONE), batch=(1, 1, 3, 3))
    assert placement_of(parallel) == expected


def test_channels_are_divided_in_all_stages_or_in_some():
    ranks = {
        "parallel.tensor=3": (3, 3),
        "parallel.tensor=[1,4]": (1, 4),
        "parallel.late=tensor": (1, 2),
    }
    for words, tensor in ranks.items():
        parallel = config("parallel=sp+pp", *words.split()).parallel
        assert placement_of(parallel) == Placement(1, ((2, 1), ONE), tensor=tensor)
    assert placement_of(config("parallel.tensor=[1]").parallel) == Placement(1, (ONE,))
    late = placement_of(config("parallel=sp+pp", "parallel.late=local_dp").parallel)
    assert late == Placement(1, ((2, 1), ONE), batch=(1, 2))


def test_grids_have_a_number_for_each_spatial_dim():
    assert placement_of(config("parallel=none").parallel, 3) == Placement(1, ((1, 1, 1),))
    volumes = config("parallel=sp+pp", "parallel.grid=[1,2,2]").parallel
    assert placement_of(volumes) == placement_of(volumes, 3) == Placement(1, ((1, 2, 2), (1, 1, 1)))
    assert placement_of(config("parallel=sp", "parallel.grid=[3]").parallel, 1) == Placement(
        1, ((3,),)
    )
    halves = config("parallel=sp").parallel  # [2, 1]
    assert placement_of(halves, 3) == Placement(1, ((2, 1, 1),))
    assert placement_of(halves, 1) == Placement(1, ((2,),))
    sentence = r"grid=\[1, 2\] has 2 numbers, but the images have 3 spatial dims: set one per dim"
    with pytest.raises(ValueError, match=sentence):
        placement_of(config("parallel=sp", "parallel.grid=[1,2]").parallel, 3)
    for grid in ("[2,1,1]", "[1,2,1]"):
        with pytest.raises(ValueError, match="has 3 numbers, one too many, but the images have 2"):
            placement_of(config("parallel=sp", f"parallel.grid={grid}").parallel, 2)
    with pytest.raises(ValueError, match=r"of 8x8x8 have 3 spatial dims, but parallel.grid has 2"):
        check_image((8, 8, 8), Placement(1, ((2, 1),)))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["parallel.grid=[]"],
            r"grid must be \[rows,columns\], .* or a list .*, got \[\]",
        ),
        (["parallel.grid=[2,1,1,1]"], r"parallel.grid must be \[rows,columns\]"),
        (["parallel.spatial_stages=2"], "spatial_stages=2 must lie between 0 and.*stages=1"),
        (["parallel.spatial_stages=-1"], "spatial_stages must be a whole number of at least 0"),
        (["parallel.grid=[2,2]"], r"grid=\[2, 2\] splits images, but parallel=none has no spatial"),
        (
            ["parallel.microbatches=0"],
            "microbatches must be a whole number of at least 1, got 0",
        ),
        (["parallel.data=0"], "parallel.data must be a whole number of at least 1, got 0"),
        (["parallel.stages=0"], "parallel.stages must be a whole number of at least 1, got 0"),
        (
            ["parallel=sp", "parallel.grid=[0,2]"],
            r"grid=\[0, 2\] needs numbers of at least 1",
        ),
        (
            ["parallel.grid=2x1"],
            r"grid must be \[rows,columns\], .* or a list .*, got 2x1",
        ),
        (["parallel.grid=[a,b]"], r"parallel.grid must be \[rows,columns\].*, got \['a', 'b'\]"),
        (["parallel=sp", "parallel.grid=[[2,1],[1,2]]"], "2 grids, but .*spatial_stages=1: set"),
        (["parallel=sp", "parallel.grid=[[2,1],3]"], "2 grids, but .*spatial_stages=1: set"),
        (
            ["parallel=sp+pp", "parallel.spatial_stages=2", "parallel.grid=[[2,1],3]"],
            r"parallel.grid must be \[rows,columns\], .* or a list .*, got 3",
        ),
        (["parallel.stages=two"], "parallel.stages must be a whole number of at least 1, got two"),
        (["parallel.schedule=dualpipe"], "unknown schedule dualpipe .*: take one of gpipe, 1f1b"),
        (["parallel=pp", "parallel.local_dp=2"], r"spatial_stages=0 of parallel\.stages=2: use"),
        (["parallel=sp", "parallel.local_dp=2"], r"local_dp=2 splits.*parallel\.data=2"),
        (
            ["parallel=sp+pp", "parallel.local_dp=0"],
            "local_dp must be a whole number of at least 1",
        ),
        (
            ["parallel.interleave=0"],
            "interleave must be a whole number of at least 1, got 0",
        ),
        (
            ["parallel=pp", "parallel.stages=5", "parallel.interleave=2"],
            "stages=5 is not divisible by parallel.interleave=2: use 6 stages",
        ),
        (
            ["parallel=sp+pp", "parallel.stages=4", "parallel.interleave=2"],
            "set parallel.spatial_stages=4 or 0, not 1",
        ),
        (
            ["parallel=pp", "parallel.stages=4", "parallel.interleave=2"],
            "schedule=gpipe with parallel.interleave=2.* need parallel.schedule=interleaved, which",
        ),
        (["parallel=pp", "parallel.schedule=interleaved"], "interleaved with.*interleave=1"),
        (
            ["parallel=pp", "parallel.interleave=2", "parallel.schedule=interleaved"],
            "2 stages on one group of ranks has no other group to alternate with",
        ),
        (["parallel.gems.variant=mast"], "1 stages on one group of ranks has no other group"),
        (
            ["parallel.gems.variant=huge"],
            "gems.variant=huge is unknown: use one of none, basic, mast, master",
        ),
        (["parallel=gems", "parallel.schedule=1f1b"], "schedule=1f1b cannot be combined with GEMS"),
        (
            ["parallel=sp+gems", "parallel.schedule=zero_bubble"],
            "zero_bubble cannot be combined with GEMS",
        ),
        (
            ["parallel.stages=4", "parallel.interleave=2", "parallel.schedule=zero_bubble"],
            "schedule=zero_bubble with parallel.interleave=2: ranks that hold several stages need",
        ),
        (
            ["parallel=sp", "parallel.cut=[layer2]"],
            r"cut=\['layer2'\] sets .* but parallel=sp has one stage: use parallel=lp or pp",
        ),
        (
            ["parallel.shard_state=true"],
            r"shard_state=true cannot be combined with parallel\.data=1",
        ),
        (["parallel=dp", "parallel.shard_state=2"], "shard_state=2 must be true or false"),
        (["parallel=dp+gems", "parallel.shard_state=true"], "shard_state=true .* with GEMS"),
        (
            ["parallel=dp+pp", "parallel.shard_state=true", "parallel.schedule=zero_bubble"],
            "shard_state=true cannot be combined with parallel.schedule=zero_bubble",
        ),
        (
            [
                "parallel=dp+pp",
                "parallel.shard_state=true",
                "parallel.stages=4",
                "parallel.interleave=2",
                "parallel.schedule=interleaved",
            ],
            "shard_state=true cannot be combined with parallel.interleave=2",
        ),
        (
            ["parallel=dp+sp+pp", "parallel.shard_state=true", "parallel.local_dp=2"],
            "shard_state=true cannot be combined with parallel.local_dp=2",
        ),
        (["parallel.tensor=0"], "parallel.tensor must be a whole number of at least 1"),
        (["parallel=pp", "parallel.tensor=[2]"], r"tensor=\[2\] has 1 numbers, .*stages=2"),
        (
            ["parallel=gems", "parallel.tensor=[1,2]"],
            "stages that share ranks .*GEMS.* one number for all",
        ),
        (["parallel=sp", "parallel.late=tensor"], "late=tensor .*spatial_stages=1 of .*stages=1"),
        (
            ["parallel=sp+pp", "parallel.late=all"],
            "late=all is unknown: use one of local_dp, tensor",
        ),
        (
            ["parallel=sp+pp", "parallel.late=tensor", "parallel.tensor=4"],
            r"late=tensor uses .*prod\(parallel.grid\)=2, but parallel.tensor=4: set only",
        ),
        (["parallel.tensor_plan={fc: input}"], "has no effect without split channels"),
        (
            ["parallel.tensor=2", "parallel.tensor_plan={fc: rows}"],
            "one of output, input, replicate, got rows",
        ),
        (
            ["parallel=gems", "parallel.gems.times=2"],
            "gems.times=2 is for parallel.gems.variant=master, not for mast",
        ),
        (["parallel=gems", "parallel.gems.times=0"], "parallel.gems.times must be a whole number"),
        (
            ["parallel=gems", "parallel.microbatches=3"],
            "a multiple of 2: parallel.microbatches=3 is not, take 4",
        ),
        (
            [
                "parallel=gems",
                "parallel.gems.variant=master",
                "parallel.gems.times=3",
                "parallel.microbatches=4",
            ],
            "times=3 times.*a multiple of 6: parallel.microbatches=4 is not, take 6",
        ),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(overrides, sentence):
    parallel = config(*overrides).parallel
    with pytest.raises(ValueError, match=sentence):
        schedule_of(parallel, placement_of(parallel))


def test_a_batch_must_reach_for_every_microbatch_of_every_replica():
    replicated = Placement(2, (ONE,))
    check_batch(8, 4, replicated)
    with pytest.raises(
        ValueError,
        match=r"batch_size=7 cannot be split into parallel.microbatches=4 x parallel.data=2: "
        "use at least 8",
    ):
        check_batch(7, 4, replicated)


def test_ranks_that_divide_samples_need_samples_and_labels():
    both = Placement(2, ((2, 1), ONE), batch=(1, 2))
    check_batch(8, 2, both)
    with pytest.raises(
        ValueError, match=r"parallel\.data=2 x parallel\.local_dp=2: use at least 8"
    ):
        check_batch(7, 2, both)
    divided = Placement(1, ((2, 1), ONE), batch=(1, 2))
    classes, maps = ({"name": name, "loss": None} for name in ("classification", "segmentation"))
    check_task(OmegaConf.create(classes), divided)
    check_task(OmegaConf.create(maps), Placement(1, ((2, 1), ONE)))
    with pytest.raises(ValueError, match=r"segmentation does not support parallel\.local_dp=2"):
        check_task(OmegaConf.create(maps), divided)
    weighed = {**classes, "class_weights": [0.0, 1.0], "label_smoothing": 0.1}
    check_task(OmegaConf.create({**weighed, "label_smoothing": 0.0}), divided)
    with pytest.raises(ValueError, match=r"label_smoothing=0\.1 does not support"):
        check_task(OmegaConf.create(weighed), divided)
    own = OmegaConf.create({**classes, "loss": {"_target_": "my.Loss"}})
    check_task(own, Placement(1, ((2, 1), ONE)))
    with pytest.raises(ValueError, match=r"task\.loss=my\.Loss does not support parallel\.local_d"):
        check_task(own, divided)


@pytest.mark.parametrize("size", [(2, 9), (9, 2)])
def test_an_image_must_reach_for_every_stage(size):
    check_image((3, 3), Placement(1, ((3, 3), ONE)))
    with pytest.raises(ValueError, match=f"{size[0]}x{size[1]} is smaller than the grid 3x3"):
        check_image(size, Placement(1, (ONE, (3, 3))))


def test_the_process_that_starts_the_ranks_needs_no_torch():
    code = "import sys, spatialdl.training.layouts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_cut_their_parts_into_virtual_tiles():
    assert placement_of(config("parallel.stream=[2,3]").parallel, 2) == Placement(
        1, (ONE,), stream=(2, 3)
    )
    both = config("parallel=sp+pp", "parallel.stream=[2,1]").parallel
    assert placement_of(both) == Placement(1, ((2, 1), ONE), stream=(2, 1))
    assert placement_of(config("parallel.stream=[1,1]").parallel) == Placement(
        1, (ONE,), stream=ONE
    )


@pytest.mark.parametrize(
    ("value", "dims", "stream"),
    [
        ("[3,1]", 3, (3, 1, 1)),
        ("[3]", 3, (3, 1, 1)),
        ("[2,1,2]", 3, (2, 1, 2)),
        ("[3]", 1, (3,)),
        ("[3,1]", 1, (3,)),
        ("[4]", 2, (4, 1)),
    ],
)
def test_virtual_tiles_of_volumes_and_signals(value, dims, stream):
    assert placement_of(config(f"parallel.stream={value}").parallel, dims).stream == stream


@pytest.mark.parametrize(
    ("overrides", "dims", "sentence"),
    [
        *(
            (
                f"parallel.stream={value}",
                2,
                r"^parallel.stream must be \[rows,columns\], or "
                rf"\[slices,rows,columns\] for volumes, got {said}$",
            )
            for value, said in (
                ("4", "4"),
                ("[]", r"\[\]"),
                ("[2,2,2,2]", r"\[2, 2, 2, 2\]"),
                ("[2.0,2]", r"\[2.0, 2\]"),
                ("[true,2]", r"\[True, 2\]"),
                ("[[2,2],[1,1]]", r"\[\[2, 2\], \[1, 1\]\]"),
                ("half", "half"),
            )
        ),
        ("parallel.stream=[2,0]", 2, r"parallel.stream=\[2, 0\] needs numbers of at least 1"),
        ("parallel.stream=[-1,2]", 2, "needs numbers of at least 1"),
        (
            "parallel.stream=[2,2]",
            3,
            r"stream=\[2, 2\] has 2 numbers, but the images have 3 spatial dims: set one per "
            r"dim, parallel.stream=\[slices,rows,columns\]",
        ),
        ("parallel.stream=[2,2]", 1, r"but the images have 1 spatial dims.*=\[positions\]"),
        ("parallel.stream=[2,2] parallel.tensor=2", 2, "parallel.tensor=2 does not support virt"),
        (
            "parallel=sp+pp parallel.stream=[2,2] parallel.local_dp=2",
            2,
            r"parallel.local_dp=2 does not support virtual tiles, parallel.stream=\[2, 2\]: set",
        ),
        ("parallel=sp+pp parallel.stream=[2,2] parallel.late=tensor", 2, "late=tensor does not"),
        ("parallel=sp+pp parallel.stream=[2,2] parallel.late=local_dp", 2, "late=local_dp does"),
        *(
            (
                f"parallel=dp parallel.stream=[1,1] parallel.{what}",
                2,
                f"parallel.{what} does not support",
            )
            for what in ("sync_batchnorm=true", "shard_state=true", "schedule=zero_bubble")
        ),
    ],
)
def test_virtual_tiles_that_cannot_be(overrides, dims, sentence):
    with pytest.raises(ValueError, match=sentence):
        placement_of(config(*overrides.split()).parallel, dims)


def test_an_image_has_a_pixel_for_each_virtual_tile():
    placement = Placement(1, ((2, 1),), stream=(2, 3))
    check_image((4, 3), placement)
    for size in ((3, 9), (9, 2)):
        sentence = "smaller than the 4x3 virtual tiles: use a smaller parallel.stream, parallel.gri"
        with pytest.raises(ValueError, match=sentence):
            check_image(size, placement)
