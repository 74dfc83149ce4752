"""The layouts, networks and sizes of which every one must give the numbers of one process."""

from __future__ import annotations

from typing import NamedTuple

from spatialdl.layout.placement import Placement
from spatialdl.pipeline.schedule import GEMS

MOST_RANKS = {"resnet18": 3, "amoebanet_d": 2, "resnet50": 2, "resnet110_v2": 2, "swin": 1}
"""Deep networks are run on more ranks, and in other ways, by the longer proof only."""


class Case(NamedTuple):
    """One row of the table."""

    parallel: str
    network: str
    size: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]
    data: int = 1
    microbatches: int = 1
    batch: int = 4
    cut: tuple[str, ...] = ()
    gather_before: str = ""
    recompute: bool | str = False  # True: of blocks
    schedule: str = "gpipe"
    interleave: int = 1
    times: int = 1
    sync: bool = False
    clip: float = 0.0
    local: tuple[int, ...] = ()
    shard: bool = False
    order: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()
    stream: tuple[int, ...] = ()
    pinned: bool = False
    """Whether the row holds a bug of the past, and is run each time (`tests.mpi.covering`)."""

    @property
    def placement(self) -> Placement:
        mirrored = self.schedule in GEMS
        more = (self.interleave, mirrored, self.local, self.order, self.tensor, self.stream)
        return Placement(self.data, self.grids, *more)

    def __str__(self) -> str:
        grids = "-".join("x".join(map(str, grid)) for grid in self.grids)
        size = "x".join(map(str, self.size))
        return (
            f"{self.parallel}-{self.network}-{size}-{grids}-d{self.data}"
            f"-m{self.microbatches}-b{self.batch}"
            + "-recompute" * bool(self.recompute)
            + "-stage" * (self.recompute == "stage")
            + f"-{self.schedule}" * (self.schedule != "gpipe")
            + f"{self.interleave}" * (self.interleave > 1)
            + "-sync" * self.sync
            + "-clip" * bool(self.clip)
            + "-local" * bool(self.local)
            + "+".join(map(str, self.local))
            + "-shard" * self.shard
            + "-order" * bool(self.order)
            + "".join(map(str, self.order))
            + "-channels" * bool(self.tensor)
            + "+".join(map(str, self.tensor))
            + "-stream" * bool(self.stream)
            + "x".join(map(str, self.stream))
        )

    @property
    def takes_long(self) -> bool:
        """Whether it is left to the longer proof."""
        if self.network not in MOST_RANKS:
            return False
        ranks, most = self.placement.world_size, MOST_RANKS[self.network]
        is_plain = self.schedule == "gpipe" and not self.recompute
        return ranks > most or (ranks == most and not is_plain)

    @property
    def segments(self) -> bool:
        return self.network in ("unet", "unet3d")


# 32 x 32 leaves ranks without pixels in the last layers; there BatchNorm sees one pixel a sample,
# so more samples are needed for well-conditioned numbers
CASES = [
    # two ranks
    Case("sp", "resnet18", (64, 64), ((2, 1),)),
    Case("sp", "resnet18", (70, 93), ((1, 2),)),
    Case("sp", "resnet50", (70, 93), ((2, 1),)),
    Case("sp", "resnet18", (32, 32), ((1, 2),), batch=8),
    Case("sp", "resnet110_v2", (37, 29), ((2, 1),), batch=2),
    Case("sp", "odd", (101, 50), ((2, 1),)),
    Case("sp", "odd", (41, 67), ((1, 2),), microbatches=3, batch=7),
    Case("dp", "resnet18", (64, 64), ((1, 1),), data=2),
    Case("dp", "odd", (45, 50), ((1, 1),), data=2, microbatches=2, batch=8),
    Case("lp", "resnet18", (70, 93), ((1, 1), (1, 1))),
    Case("lp", "resnet110_v2", (32, 32), ((1, 1), (1, 1)), batch=2),
    Case("pp", "resnet18", (70, 93), ((1, 1), (1, 1)), microbatches=2),
    Case("pp", "odd", (50, 50), ((1, 1), (1, 1)), microbatches=4, batch=7, cut=("2",)),
    Case("dp", "resnet110_v2", (33, 35), ((1, 1),), data=2),
    Case("pp", "resnet110_v2", (33, 35), ((1, 1), (1, 1)), microbatches=2),
    # three ranks
    Case("sp", "resnet18", (70, 93), ((3, 1),)),
    Case("sp", "resnet18", (32, 32), ((3, 1),), batch=8),
    Case("sp", "odd", (64, 64), ((1, 3),)),
    Case("dp", "odd", (64, 64), ((1, 1),), data=3, batch=9),
    Case("pp", "resnet18", (64, 64), ((1, 1), (1, 1), (1, 1)), microbatches=2),
    Case("sp+lp", "resnet18", (101, 50), ((2, 1), (1, 1))),
    Case("sp+pp", "resnet18", (70, 93), ((1, 2), (1, 1)), microbatches=2),
    Case("sp+pp", "resnet110_v2", (37, 29), ((2, 1), (1, 1)), microbatches=2),
    Case("sp+pp", "odd", (101, 50), ((2, 1), (1, 1)), microbatches=3, batch=6),
    Case("sp+pp", "odd", (101, 50), ((1, 1), (2, 1)), microbatches=2, cut=("4",)),
    Case("sp+pp", "resnet18", (64, 64), ((2, 1), (1, 1)), cut=("avgpool",)),
    # after pooling every rank of the first stage holds a copy
    Case("sp+pp", "resnet18", (64, 64), ((2, 1), (1, 1)), microbatches=2, cut=("flatten",)),
    Case("sp+lp", "resnet110_v2", (33, 35), ((1, 2), (1, 1)), batch=2),
    # four ranks
    Case("sp", "resnet18", (70, 93), ((2, 2),)),
    Case("sp", "resnet50", (64, 64), ((2, 2),)),
    Case("sp", "resnet18", (32, 32), ((2, 2),), batch=8),
    Case("sp", "odd", (101, 50), ((4, 1),)),
    Case("dp+sp", "resnet18", (70, 93), ((2, 1),), data=2),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), data=2, microbatches=2, batch=9),
    Case("dp+pp", "odd", (64, 64), ((1, 1), (1, 1)), data=2, microbatches=2, batch=8),
    Case("sp+lp", "resnet18", (70, 93), ((3, 1), (1, 1))),
    Case("sp+pp", "resnet18", (64, 64), ((2, 1), (2, 1)), microbatches=2),
    Case("sp+pp", "resnet18", (70, 93), ((2, 1), (1, 2)), microbatches=2),
    Case("sp+pp", "odd", (101, 50), ((1, 1), (3, 1)), microbatches=2, cut=("4",)),
    Case("sp+pp", "resnet18", (101, 50), ((2, 1), (1, 1), (1, 1)), microbatches=2),
    # five and six ranks: stages of 4 ranks beside stages of 1 and 2
    Case("sp+pp", "odd", (70, 93), ((2, 2), (1, 1)), microbatches=2),
    Case("sp+pp", "odd", (64, 64), ((1, 1), (2, 2)), microbatches=2, cut=("4",)),
    Case("sp+lp", "resnet18", (70, 93), ((2, 2), (1, 1))),
    Case("sp+pp", "odd", (101, 50), ((2, 2), (2, 1)), microbatches=2, cut=("4",)),
    Case("sp+pp", "resnet18", (70, 93), ((2, 2), (1, 2)), microbatches=2),
    Case("dp+sp+lp", "odd", (64, 64), ((2, 1), (1, 1)), data=2),
]

SEGMENTATION = [
    Case("none", "unet", (37, 29), ((1, 1),), microbatches=2),
    Case("dp", "unet", (37, 29), ((1, 1),), data=2, batch=5),
    Case("sp", "unet", (64, 64), ((2, 1),)),
    Case("sp", "unet", (37, 29), ((1, 2),), microbatches=2),
    Case("sp", "unet", (70, 93), ((2, 1),), batch=2),
    Case("sp", "unet", (45, 29), ((3, 1),), batch=3),
    Case("sp", "unet", (33, 41), ((1, 3),), microbatches=2, batch=5),
    Case("sp", "unet", (70, 93), ((2, 2),), batch=2),
    Case("sp", "unet", (21, 19), ((2, 2),), batch=4),  # ranks without pixels at the bottom
    Case("sp", "unet", (61, 32), ((4, 1),), batch=2),
    Case("dp+sp", "unet", (37, 29), ((2, 1),), data=2, microbatches=2, batch=7),
]

RECOMPUTED = [
    Case("none", "resnet18", (33, 35), ((1, 1),), microbatches=2, recompute=True),
    Case("none", "odd", (45, 50), ((1, 1),), recompute=True),
    Case("none", "unet", (37, 29), ((1, 1),), recompute=True),
    Case("dp", "resnet18", (33, 35), ((1, 1),), data=2, microbatches=2, recompute=True),
    Case("sp", "resnet18", (70, 93), ((1, 2),), recompute=True),
    Case("sp", "resnet18", (32, 32), ((2, 1),), batch=8, recompute=True),
    Case("sp", "resnet110_v2", (37, 29), ((2, 1),), batch=2, recompute=True),
    Case("sp", "odd", (41, 67), ((1, 2),), microbatches=3, batch=7, recompute=True),
    Case("sp", "unet", (37, 29), ((2, 1),), recompute=True),
    Case("pp", "resnet18", (70, 93), ((1, 1), (1, 1)), microbatches=2, recompute=True),
    Case("pp", "odd", (50, 50), ((1, 1),) * 2, microbatches=4, cut=("2",), recompute=True),
    Case("sp", "odd", (64, 64), ((1, 3),), recompute=True),
    Case("sp", "resnet18", (32, 32), ((3, 1),), batch=8, recompute=True),
    Case("sp+pp", "resnet18", (70, 93), ((1, 2), (1, 1)), microbatches=2, recompute=True),
    Case("sp", "resnet50", (64, 64), ((2, 2),), recompute=True),
    Case("sp", "unet", (21, 19), ((2, 2),), recompute=True),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), data=2, microbatches=2, batch=9, recompute=True),
]

RECOMPUTED += [
    case._replace(recompute="stage")
    for case in (
        Case("none", "odd", (45, 50), ((1, 1),), microbatches=2),
        Case("sp", "resnet18", (70, 93), ((1, 2),)),
        Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b"),
        Case("gems", "skips", (33, 29), ((1, 1),) * 2, 1, 2, 5, schedule="mast"),
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, microbatches=2, batch=8, sync=True),
        Case("sp+pp", "odd", (101, 50), ((2, 1), (1, 1)), microbatches=3, batch=6),
    )
]

GATHERED = [
    Case("none", "vgg", (50, 34), ((1, 1),), gather_before="classifier"),
    Case("sp", "vgg", (50, 34), ((2, 1),), gather_before="classifier"),
    Case("sp", "vgg", (50, 34), ((1, 2),), gather_before="classifier.0", recompute=True),
    Case("sp", "vgg", (50, 34), ((3, 1),), gather_before="features.6", microbatches=2),
    Case("sp", "vgg", (50, 34), ((2, 2),), gather_before="classifier"),
    *(
        Case("sp+pp", "vgg", (50, 34), ((2, 1), last), 1, 2, 4, (cut,), "classifier")
        for last, cut in (((1, 1), "features.3"), ((2, 1), "features.3"), ((2, 1), "classifier.1"))
    ),
    Case("sp+pp", "vgg", (50, 34), ((2, 1), (1, 1)), 1, 2, 4, ("classifier.1",), "classifier"),
    Case("sp+pp", "vgg", (50, 34), ((1, 2), (2, 1)), 1, 2, 4, ("features.4",), "classifier"),
    Case("dp+sp", "vgg", (50, 34), ((1, 2),), data=2, gather_before="classifier"),
    # a class for every pixel: the output is full, its targets are split
    Case("none", "unet", (37, 29), ((1, 1),), gather_before="head"),
    Case("sp", "unet", (37, 29), ((2, 1),), microbatches=2, batch=5, gather_before="head"),
    Case("sp", "unet", (37, 29), ((1, 2),), batch=3, gather_before="decoder.2", recompute=True),
    Case("sp+pp", "unet", (37, 29), ((2, 1), (2, 1)), 1, 2, 3, ("upsample.1",), "decoder.2"),
    Case("sp+lp", "unet", (37, 29), ((1, 2), (2, 1)), 1, 1, 3, ("head",), "decoder.2"),
    Case("sp", "unet", (21, 19), ((2, 2),), batch=3, gather_before="head"),
]

# the same heads over maps that stay split; some stages end behind the flattened map
FLATTENED = [
    Case("sp", "vgg", (50, 34), ((2, 1),)),
    Case("sp", "vgg", (50, 34), ((1, 2),), microbatches=2, batch=5, recompute=True),
    Case("sp", "vgg", (50, 34), ((3, 1),), recompute="stage"),
    Case("sp", "vgg", (50, 34), ((2, 2),)),
    Case("sp+pp", "vgg", (50, 34), ((2, 1), (1, 1)), 1, 2, 4, ("classifier.0",)),
    Case("sp+pp", "vgg", (50, 34), ((2, 1), (1, 1)), 1, 2, 4, ("classifier.1",)),
    Case("sp+pp", "vgg", (50, 34), ((1, 2), (1, 1)), 1, 2, 5, ("classifier.2",), schedule="1f1b"),
    Case("sp+pp", "vgg", (50, 34), ((2, 1), (2, 1)), 1, 2, 4, ("classifier.1",)),
    Case(
        *("sp+pp", "vgg", (50, 34), ((1, 2), (1, 2)), 1, 2, 4, ("classifier.1",)),
        schedule="1f1b",
    ),
    Case("dp+sp", "vgg", (50, 34), ((1, 2),), data=2, shard=True),
]


RANDOM = [
    Case("none", "random", (37, 29), ((1, 1),), microbatches=2),
    Case("none", "random", (37, 29), ((1, 1),), microbatches=2, recompute=True),
    Case("none", "random_net", (37, 29), ((1, 1),), recompute=True),
    Case("sp", "random", (37, 29), ((2, 1),)),
    Case("sp", "random", (37, 29), ((1, 2),), microbatches=2, batch=5, recompute=True),
    Case("sp", "random_net", (37, 29), ((2, 1),), recompute=True),
    Case("dp", "random", (37, 29), ((1, 1),), data=2, microbatches=2, batch=7),
    Case("dp", "random_net", (37, 29), ((1, 1),), data=2),
    Case("lp", "random", (37, 29), ((1, 1), (1, 1)), cut=("flatten",)),
    Case("pp", "random", (37, 29), ((1, 1), (1, 1)), microbatches=2, cut=("block2",)),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, microbatches=2, cut=("pixels",), recompute=True),
    Case("sp", "random_net", (37, 29), ((1, 3),)),
    Case("sp+lp", "random", (37, 29), ((1, 2), (1, 1)), cut=("block1",)),
    Case("sp+pp", "random", (37, 29), ((2, 1), (1, 1)), microbatches=2, cut=("block2",)),
    Case("sp+pp", "random", (37, 29), ((1, 1), (1, 2)), 1, 2, 5, ("channels",), recompute=True),
    Case("sp", "random", (37, 29), ((2, 2),)),
    Case("dp+sp", "random", (37, 29), ((2, 1),), data=2, microbatches=2, batch=9),
    Case("dp+sp", "random", (37, 29), ((1, 2),), data=2, recompute=True),
    Case("dp+pp", "random", (37, 29), ((1, 1), (1, 1)), 2, 2, 8, ("block1",)),
]


SCHEDULED = [
    case._replace(schedule="1f1b")
    for case in (
        Case("none", "odd", (45, 50), ((1, 1),), microbatches=3, batch=7),
        Case("pp", "odd", (50, 50), ((1, 1), (1, 1)), microbatches=5, batch=7, cut=("2",)),
        Case("pp", "resnet18", (70, 93), ((1, 1), (1, 1)), microbatches=2, recompute=True),
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, microbatches=2, batch=8),
        Case("pp", "resnet18", (64, 64), ((1, 1), (1, 1), (1, 1)), microbatches=2),
        Case("sp+pp", "odd", (101, 50), ((2, 1), (1, 1)), microbatches=4, batch=9),
        Case("sp+pp", "random", (37, 29), ((1, 1), (1, 2)), 1, 3, 7, ("channels",)),
        Case("pp", "resnet110_v2", (33, 35), ((1, 1),) * 4, microbatches=4),
        Case("sp+pp", "resnet18", (101, 50), ((2, 1), (1, 1), (1, 1)), microbatches=3, batch=6),
        Case("dp+pp", "random", (37, 29), ((1, 1), (1, 1)), 2, 3, 8, ("block1",)),
        Case("sp+pp", "odd", (70, 93), ((2, 2), (1, 1)), microbatches=3),
        Case("dp+sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), data=2, microbatches=3, batch=9),
        Case("sp+pp", "vgg", (50, 34), ((2, 1), (1, 1)), 1, 3, 6, ("features.3",), "classifier"),
        Case("pp", "random", (37, 29), ((1, 1),) * 3, 1, 5, 7, ("conv2", "block2"), "", "stage"),
        Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 3, 7),  # some have none
    )
]


INTERLEAVED = [
    case._replace(schedule="interleaved", interleave=interleave)
    for interleave, case in (
        (2, Case("pp", "resnet18", (70, 93), ((1, 1),) * 4, microbatches=4)),
        (3, Case("pp", "resnet110_v2", (33, 35), ((1, 1),) * 6, microbatches=5, batch=5)),
        (2, Case("pp", "odd", (45, 50), ((1, 1),) * 4, microbatches=3, batch=2)),
        (2, Case("pp", "random", (37, 29), ((1, 1),) * 6, microbatches=3, batch=7)),
        (2, Case("sp+pp", "odd", (101, 50), ((2, 1),) * 4, 1, 2, 5, ("1", "3", "5"))),
        (2, Case("sp+pp", "resnet18", (70, 93), ((1, 2), (2, 1)) * 2, microbatches=2)),
        (2, Case("dp+pp", "random", (37, 29), ((1, 1),) * 4, data=2, microbatches=4, batch=9)),
    )
]

MIRRORED = [
    case._replace(schedule=variant)
    for variant, case in (
        ("mast", Case("gems", "resnet18", (70, 93), ((1, 1),) * 2, microbatches=2)),
        ("basic", Case("gems", "odd", (45, 50), ((1, 1),) * 2, microbatches=4, batch=9)),
        ("master", Case("gems", "random", (37, 29), ((1, 1),) * 2, 1, 8, 9, times=2)),
        ("mast", Case("gems", "resnet110_v2", (33, 35), ((1, 1),) * 2, 1, 2, 3, recompute=True)),
        ("basic", Case("gems", "random", (37, 29), ((1, 1),) * 3, microbatches=6, batch=5)),
        ("mast", Case("sp+gems", "odd", (101, 50), ((2, 1), (1, 1)), microbatches=4, batch=6)),
        ("basic", Case("sp+gems", "resnet18", (70, 93), ((1, 2), (1, 1)), microbatches=2)),
        ("master", Case("sp+gems", "random", (37, 29), ((1, 1), (2, 1)), 1, 4, 5, times=2)),
        ("basic", Case("sp+gems", "odd", (101, 50), ((2, 1), (2, 1)), microbatches=2)),
        ("mast", Case("sp+gems", "resnet18", (101, 50), ((2, 1), (1, 1), (1, 1)), microbatches=2)),
        (
            "mast",
            Case("dp+gems", "random", (37, 29), ((1, 1),) * 2, data=2, microbatches=4, batch=9),
        ),
        ("basic", Case("sp+gems", "odd", (70, 93), ((2, 2), (1, 1)), microbatches=4)),
        ("mast", Case("dp+sp+gems", "odd", (64, 64), ((2, 1), (1, 1)), 2, 2, 7)),
    )
]


SYNCED = [
    case._replace(sync=True)
    for case in (
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, microbatches=2, batch=8),
        Case("dp", "resnet18", (33, 35), ((1, 1),), data=2, microbatches=3, batch=7),
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, microbatches=3, batch=5),  # some have none
        Case("dp", "resnet18", (33, 35), ((1, 1),), data=2, microbatches=2, recompute=True),
        Case("dp", "odd", (33, 35), ((1, 1),), data=3, batch=4),
        Case("dp+sp", "odd", (41, 67), ((1, 2),), data=2, microbatches=2, batch=9),
        Case("dp+sp", "resnet18", (32, 32), ((2, 1),), data=2, batch=8),
        Case("dp+sp", "odd", (41, 67), ((2, 1),), data=2, microbatches=3, batch=5, recompute=True),
        Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 3, 7, schedule="1f1b"),
        Case("dp+gems", "odd", (64, 64), ((1, 1),) * 2, 2, 4, 11, schedule="basic"),
        Case("dp+sp+lp", "odd", (64, 64), ((2, 1), (1, 1)), data=2),
    )
]


SKIPS = [
    Case("pp", "skips", (33, 29), ((1, 1),) * 2, 1, 3, 7, ("2",)),
    Case("pp", "skips", (33, 29), ((1, 1),) * 2, 1, 3, 7, ("3",), recompute=True),
    Case("gems", "skips", (33, 29), ((1, 1),) * 2, 1, 4, 7, ("1",), schedule="basic"),
    Case("sp+pp", "skips", (33, 29), ((2, 1), (1, 1)), 1, 2, 5, ("2",), schedule="1f1b"),
    Case("sp+pp", "skips", (33, 29), ((1, 1), (1, 2)), 1, 2, 5, ("4",)),
    Case("pp", "skips", (33, 29), ((1, 1),) * 3, 1, 2, 5, ("1", "4")),
    Case("sp+pp", "skips", (33, 29), ((2, 1), (1, 2)), 1, 2, 5, ("2",)),
    Case("sp", "amoebanet_d", (101, 75), ((2, 1),), batch=3),
    Case("pp", "amoebanet_d", (97, 70), ((1, 1),) * 2, 1, 2, 6, schedule="1f1b"),
    Case("sp+pp", "amoebanet_d", (101, 75), ((1, 2), (1, 1)), 1, 2, 6),
    Case("sp+gems", "amoebanet_d", (101, 75), ((2, 1), (1, 1)), 1, 2, 6, schedule="mast"),
    Case("sp", "amoebanet_d", (101, 75), ((2, 2),), batch=3),
    Case("dp+pp", "skips", (33, 29), ((1, 1),) * 2, 2, 2, 7, ("3",)),
    Case("sp+pp", "skips", (33, 29), ((2, 2), (1, 1)), 1, 2, 5, ("1",)),
]


OWN_FORWARD = [
    # a stage that begins with an operation in place wrote into what it needs once more
    Case(
        "pp", "random", (37, 29), ((1, 1),) * 2, 1, 2, 5, ("relu",), recompute="stage", pinned=True
    ),
    Case(
        "pp",
        "random",
        (37, 29),
        ((1, 1),) * 2,
        1,
        2,
        5,
        ("pixels",),
        recompute="stage",
        pinned=True,
    ),
    Case("pp", "unet", (37, 29), ((1, 1),) * 2, 1, 2, 3),
    Case("pp", "unet", (33, 41), ((1, 1),) * 2, 1, 2, 5, ("upsample.0",), schedule="1f1b"),
    Case("gems", "unet", (37, 29), ((1, 1),) * 2, 1, 2, 3, schedule="basic"),
    Case("pp", "unet", (37, 29), ((1, 1),) * 4, 1, 3, 5, schedule="interleaved", interleave=2),
    Case("pp", "unet", (37, 29), ((1, 1),) * 2, 1, 2, 3, recompute=True),
    Case("pp", "plain", (37, 29), ((1, 1),) * 2, 1, 3, 7, ("frozen",)),
    Case("pp", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 5, ("body.1",), recompute=True),
    Case("pp", "plain", (37, 29), ((1, 1),) * 4, 1, 2, 5, schedule="interleaved", interleave=2),
    Case("pp", "frozen_start", (37, 29), ((1, 1),) * 2, 1, 2, 5, ("1",)),
    Case("dp", "plain", (37, 29), ((1, 1),), 2, 2, 5),
    Case("sp", "plain", (37, 29), ((2, 1),), 1, 2, 5),
    # three ranks: what goes to two stages, and what jumps over one, from two ranks to one
    Case("pp", "twice", (37, 29), ((1, 1),) * 3, 1, 2, 3, ("second", "third")),
    Case("pp", "unet", (33, 41), ((1, 1),) * 3, 1, 2, 3, ("encoder.3", "upsample.2")),
    Case("sp+pp", "unet", (37, 29), ((2, 1), (1, 1)), 1, 2, 3, ("upsample.1",)),
    Case("gems", "plain", (37, 29), ((1, 1),) * 3, 1, 4, 5, schedule="mast"),
    Case("sp+pp", "plain", (37, 29), ((1, 2), (1, 1)), 1, 2, 5, ("body.0",), schedule="1f1b"),
    # four and five ranks
    Case("sp+pp", "unet", (33, 41), ((2, 1), (2, 1)), 1, 2, 3),
    Case("sp+pp", "unet", (33, 41), ((1, 2), (2, 1)), 1, 2, 3, ("encoder.3",)),
    Case("dp+pp", "plain", (37, 29), ((1, 1),) * 2, 2, 2, 3, ("frozen",)),
    Case("sp+pp", "unet", (33, 41), ((2, 1), (1, 1), (2, 1)), 1, 2, 3, ("encoder.3", "upsample.2")),
    Case("sp+pp", "plain", (37, 29), ((1, 2), (1, 1), (2, 1)), 1, 2, 5, ("frozen", "body.1")),
]


CLIPPED = [
    case._replace(clip=0.05)
    for case in (
        Case("none", "plain", (37, 29), ((1, 1),)),
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, batch=5),
        Case("sp", "odd", (45, 50), ((1, 2),)),
        Case("pp", "plain", (37, 29), ((1, 1),) * 2, 1, 3, 7),
        Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 5, schedule="mast"),
        Case("sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), 1, 2),
        Case("sp+gems", "plain", (37, 29), ((2, 1), (1, 1)), 1, 2, 5, schedule="basic"),
        Case("dp+pp", "plain", (37, 29), ((1, 1),) * 2, 2, 1, 5),
        # more replicas than samples
        Case("dp", "odd", (45, 50), ((1, 1),), data=3, batch=2),
        Case("dp+sp", "odd", (45, 50), ((1, 2),), data=2, batch=1),
    )
]


LOCAL = [
    # three ranks and more: images cut, or nothing, then samples
    Case("lp", "random", (37, 29), ((1, 1), (1, 1)), 1, 1, 5, local=(1, 2)),
    Case("pp", "plain", (37, 29), ((1, 1), (1, 1)), 1, 3, 7, ("frozen",), local=(1, 2)),
    Case("pp", "skips", (33, 29), ((1, 1), (1, 1)), 1, 2, 5, ("2",), local=(1, 2)),
    Case("pp", "resnet18", (33, 35), ((1, 1),) * 3, 1, 2, 3, local=(1, 2, 1)),  # a rank has none
    Case("pp", "skips", (33, 29), ((1, 1),) * 3, 1, 2, 5, ("2", "3"), local=(1, 2, 1)),
    Case("pp", "odd", (64, 64), ((1, 1),) * 3, 1, 2, 7, ("4", "8"), local=(1, 2, 2)),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 8, schedule="1f1b", local=(1, 2)),
    Case("sp+pp", "resnet18", (70, 93), ((2, 1), (1, 1)), 1, 2, 5, local=(1, 2)),
    Case("sp+lp", "odd", (64, 64), ((1, 2), (1, 1)), 1, 1, 5, ("10",), local=(1, 2)),
    Case("sp+pp", "random", (37, 29), ((2, 1), (1, 1)), 1, 3, 7, recompute="stage", local=(1, 2)),
    Case("pp", "odd", (64, 64), ((1, 1),) * 2, 1, 2, 5, recompute=True, local=(1, 2)),
    Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 9, schedule="basic", local=(1, 2)),
    Case("sp+gems", "odd", (64, 64), ((2, 1), (1, 1)), 1, 2, 6, schedule="mast", local=(1, 2)),
    Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 2, 9, local=(1, 2)),
    Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 2, 5, sync=True, local=(1, 2)),
    Case("sp+pp", "plain", (37, 29), ((2, 2), (1, 1)), 1, 2, 5, ("body.0",), local=(1, 2)),
]


SHARDED = [
    case._replace(shard=True)
    for case in (
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, batch=5),
        Case("dp", "resnet18", (33, 35), ((1, 1),), data=2, microbatches=2, batch=5),
        Case("dp", "resnet18", (33, 35), ((1, 1),), data=2, microbatches=2, recompute=True),
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, microbatches=3, batch=7, recompute="stage"),
        Case("dp", "random", (37, 29), ((1, 1),), data=2, microbatches=2, batch=7, recompute=True),
        Case("dp", "resnet18", (33, 35), ((1, 1),), data=2, microbatches=3, batch=7, sync=True),
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, batch=5, clip=0.05),
        Case("dp", "plain", (37, 29), ((1, 1),), 2, 2, 5),
        Case("dp", "frozen_start", (37, 29), ((1, 1),), 2, 2, 5),
        Case("dp", "unet", (37, 29), ((1, 1),), data=2, batch=5),
        # three ranks, four and more
        Case("dp", "odd", (64, 64), ((1, 1),), data=3, batch=9),
        Case("dp", "resnet18", (33, 35), ((1, 1),), 3, 2, 7, recompute=True, clip=0.05),
        Case("dp+sp", "odd", (41, 67), ((1, 2),), data=2, microbatches=2, batch=9),
        Case("dp+sp", "resnet18", (70, 93), ((2, 1),), data=2, recompute=True, clip=0.05),
        Case("dp+sp", "odd", (41, 67), ((2, 1),), data=2, microbatches=2, batch=5, sync=True),
        Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 3, 7),
        Case("dp+pp", "resnet18", (33, 35), ((1, 1),) * 2, 2, 3, 7, schedule="1f1b", clip=0.05),
        Case("dp+pp", "random", (37, 29), ((1, 1),) * 2, 2, 2, 8, ("block1",), recompute="stage"),
        Case("dp+pp", "plain", (37, 29), ((1, 1),) * 2, 2, 2, 5, ("frozen",)),
        # a stage that begins with an operation in place
        Case("dp+pp", "random", (37, 29), ((1, 1),) * 2, 2, 2, 5, ("relu",)),
        Case("dp+sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), 2, 2, 5, clip=0.05),
        # each rank shards its part of the channels
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, batch=5, clip=0.05, tensor=(2,)),
        Case("dp", "resnet18", (33, 35), ((1, 1),), 2, 2, 5, recompute=True, tensor=(2,)),
        Case("dp", "vit", (36, 28), ((1, 1),), 2, 2, 7, recompute="stage", tensor=(2,)),
        Case("dp", "swin", (60, 52), ((1, 1),), 2, 2, 5, clip=0.05, tensor=(2,)),
        Case("dp", "amoebanet_d", (97, 70), ((1, 1),), 2, 2, 6, tensor=(2,)),
        Case("dp", "unet", (37, 29), ((1, 1),), 2, 1, 5, tensor=(2,)),
        Case("dp+pp", "random", (37, 29), ((1, 1),) * 2, 2, 2, 8, ("block1",), tensor=(1, 2)),
        Case("dp+sp", "odd", (41, 67), ((1, 2),), 2, 2, 9, sync=True, tensor=(2,)),
    )
]

# ranks at other places than those of their numbers, as `node_order` puts them
ORDERED = [
    Case("sp", "odd", (101, 50), ((2, 1),), order=(1, 0)),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b", order=(1, 0)),
    Case("sp+pp", "odd", (101, 50), ((2, 1), (1, 1)), 1, 3, 6, order=(2, 0, 1)),
    Case("sp+gems", "odd", (101, 50), ((2, 1), (1, 1)), 1, 4, 6, schedule="mast", order=(1, 2, 0)),
    Case("pp", "skips", (33, 29), ((1, 1),) * 2, 1, 2, 5, ("2",), local=(1, 2), order=(2, 1, 0)),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), 2, 2, 9, sync=True, order=(0, 2, 1, 3)),
    Case("dp+pp", "random", (37, 29), ((1, 1),) * 2, 2, 2, 8, ("block1",), order=(3, 1, 0, 2)),
    Case("sp", "unet", (21, 19), ((2, 2),), clip=0.05, order=(3, 0, 2, 1)),
    Case(
        *("dp+pp", "random", (37, 29), ((1, 1),) * 4, 2, 4, 9),
        **{"schedule": "interleaved", "interleave": 2, "order": (2, 0, 3, 1)},
    ),
    Case("dp+sp+pp", "random", (37, 29), ((2, 1), (1, 2)), 2, 2, 9, order=(7, 0, 2, 5, 1, 4, 6, 3)),
]
SHARDED += [
    Case("dp", "odd", (64, 64), ((1, 1),), 3, batch=9, shard=True, clip=0.05, order=(2, 0, 1)),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), 2, 2, 9, shard=True, order=(0, 2, 1, 3)),
]

EIGHT_RANKS = [
    Case("sp", "odd", (101, 50), ((4, 2),)),
    Case("sp+pp", "odd", (70, 93), ((2, 2), (2, 2)), microbatches=3, batch=6, cut=("4",)),
    Case("dp+sp+pp", "random", (37, 29), ((2, 1), (1, 2)), 2, 2, 9, ("block1",), schedule="1f1b"),
    Case("dp+sp+gems", "odd", (64, 64), ((1, 2), (2, 1)), 2, 2, 7, schedule="mast"),
    Case("pp", "plain", (37, 29), ((1, 1),) * 8, microbatches=5, batch=6, schedule="1f1b"),
]


SIGNALS = [
    Case("sp", "odd_signal", (101,), ((2,),)),
    Case("sp", "odd_signal", (67,), ((2,),), microbatches=3, batch=7, recompute=True),
    Case("pp", "odd_signal", (67,), ((1,),) * 2, 1, 3, 7, schedule="1f1b"),
    Case("dp", "odd_signal", (67,), ((1,),), 2, 2, 5, shard=True),
    Case("sp", "odd_signal", (103,), ((3,),), clip=0.05),
    Case("sp+pp", "odd_signal", (101,), ((2,), (1,)), 1, 3, 6),
    Case("sp+gems", "odd_signal", (101,), ((2,), (1,)), 1, 4, 6, schedule="mast"),
    Case("sp+pp", "odd_signal", (101,), ((1,), (2,)), 1, 3, 6, schedule="1f1b"),
    Case("sp", "odd_signal", (211,), ((4,),)),
    Case("dp+sp", "odd_signal", (67,), ((2,),), 2, 2, 9, sync=True),
    Case("sp+pp", "odd_signal", (101,), ((2,), (2,)), 1, 3, 6),
    Case("sp", "odd_signal", (301,), ((5,),)),
    Case("sp", "odd_signal", (403,), ((8,),), batch=3),
]

VOLUMES = [
    Case("none", "unet3d", (11, 13, 10), ((1, 1, 1),), microbatches=2, recompute=True),
    Case("sp", "odd_volume", (13, 21, 18), ((2, 1, 1),)),
    Case("sp", "odd_volume", (13, 21, 18), ((1, 1, 2),), microbatches=2, batch=5, recompute=True),
    Case("sp", "random_volume", (13, 11, 10), ((1, 2, 1),)),
    Case("sp", "unet3d", (13, 11, 10), ((2, 1, 1),), microbatches=2, batch=3),
    Case("sp", "unet3d", (13, 11, 10), ((1, 2, 1),), batch=3, gather_before="head"),
    Case("lp", "odd_volume", (13, 21, 18), ((1, 1, 1),) * 2),
    Case("pp", "unet3d", (13, 11, 10), ((1, 1, 1),) * 2, 1, 2, 3, schedule="1f1b"),
    Case("gems", "odd_volume", (13, 21, 18), ((1, 1, 1),) * 2, 1, 2, 5, schedule="mast"),
    Case("dp", "odd_volume", (13, 21, 18), ((1, 1, 1),), 2, 2, 5, sync=True),
    # three ranks
    Case("sp", "odd_volume", (16, 21, 18), ((3, 1, 1),), clip=0.05),
    Case("sp", "unet3d", (13, 11, 10), ((1, 3, 1),), batch=3),
    Case("sp+lp", "odd_volume", (13, 21, 18), ((2, 1, 1), (1, 1, 1))),
    Case("sp+pp", "odd_volume", (13, 21, 18), ((1, 2, 1), (1, 1, 1)), 1, 3, 6, recompute="stage"),
    Case("sp+pp", "unet3d", (13, 11, 10), ((2, 1, 1), (1, 1, 1)), 1, 2, 3),
    Case("sp+pp", "random_volume", (13, 11, 10), ((1, 1, 2), (1, 1, 1)), 1, 3, 7, ("voxels",)),
    Case(
        *("sp+gems", "odd_volume", (13, 21, 18), ((2, 1, 1), (1, 1, 1)), 1, 4, 6),
        schedule="basic",
    ),
    Case("pp", "odd_volume", (13, 21, 18), ((1, 1, 1),) * 2, 1, 2, 5, local=(1, 2)),
    # four ranks: two dims are cut
    Case("sp", "odd_volume", (13, 21, 18), ((2, 2, 1),)),
    Case("sp", "odd_volume", (13, 21, 18), ((2, 1, 2),), recompute=True),
    Case("sp", "unet3d", (13, 11, 10), ((1, 2, 2),), batch=3),
    Case("sp", "odd_volume", (19, 21, 18), ((4, 1, 1),)),
    Case("dp+sp", "unet3d", (13, 11, 10), ((2, 1, 1),), 2, 2, 7),
    Case("dp+sp", "odd_volume", (13, 21, 18), ((1, 2, 1),), 2, 2, 9, shard=True, clip=0.05),
    Case("sp+pp", "odd_volume", (13, 21, 18), ((2, 1, 1), (1, 2, 1)), 1, 3, 6),
    Case("sp+pp", "unet3d", (13, 11, 10), ((2, 1, 1), (1, 1, 2)), 1, 2, 3, schedule="1f1b"),
    # more, up to a cut of all three
    Case("sp+pp", "odd_volume", (13, 21, 18), ((2, 2, 1), (1, 1, 1)), 1, 3, 6, schedule="1f1b"),
    Case("sp", "odd_volume", (13, 21, 18), ((2, 2, 2),)),
    Case("sp", "unet3d", (13, 11, 10), ((2, 2, 2),), batch=2),
    Case("sp+pp", "unet3d", (13, 11, 10), ((1, 2, 2), (2, 2, 1)), 1, 2, 3),
]


# 36 x 28 pixels are 9 x 7 tokens with three beside them, which no grid divides
TOKENS = [
    Case("sp", "transformer", (36, 28), ((2, 1),)),
    Case("sp", "transformer", (36, 28), ((1, 2),)),
    Case("sp", "transformer", (36, 28), ((1, 3),), 1, 2, 5),
    Case("sp+pp", "transformer", (36, 28), ((2, 1), (1, 1)), 1, 2, 5, ("second",)),
    Case("sp+pp", "transformer", (36, 28), ((1, 2), (1, 1)), 1, 2, 5, ("last",), schedule="1f1b"),
    Case("sp", "transformer", (36, 28), ((2, 2),)),
    Case("sp+pp", "transformer", (36, 28), ((2, 1), (2, 1)), 1, 2, 5, ("drop",), recompute="stage"),
    Case("sp+pp", "transformer", (36, 28), ((1, 2), (1, 2)), 1, 2, 5, ("first",)),
    Case("sp+pp", "transformer", (36, 28), ((1, 2), (1, 1)), 1, 2, 5, ("second",), local=(1, 2)),
    Case(
        "sp+gems", "transformer", (36, 28), ((2, 1), (1, 1)), 1, 2, 6, ("first",), schedule="mast"
    ),
    # the grid changes: of channels-last maps ("last"), of tokens with others beside them
    Case("sp+pp", "transformer", (36, 28), ((2, 1), (1, 2)), 1, 2, 5, ("second",)),
    Case("sp+pp", "transformer", (36, 28), ((1, 2), (2, 1)), 1, 2, 5, ("last",), schedule="1f1b"),
    Case("sp+pp", "transformer", (36, 28), ((1, 2), (2, 1)), 1, 2, 5, ("drop",), recompute="stage"),
    Case("sp+pp", "transformer", (36, 28), ((3, 1), (1, 2)), 1, 2, 5, ("second",)),
    Case(
        *("sp+pp", "transformer", (36, 28), ((2, 1), (1, 2), (1, 1)), 1, 2, 5, ("last", "second")),
        schedule="1f1b",
    ),
]


# 9 x 7 tokens, 7 x 1 (grids of which some ranks have none), and rows of an odd number of tokens
VIT = [
    Case("none", "vit", (36, 28), ((1, 1),), microbatches=2, recompute=True),
    Case("sp", "vit", (36, 28), ((2, 1),)),
    Case("sp", "vit", (36, 28), ((1, 2),), 1, 2, 5, recompute=True),
    Case("sp", "vit_plain", (28, 4), ((1, 2),)),
    Case("sp", "vit_mean", (36, 28), ((1, 2),)),
    Case("sp", "vit_mean_registers", (20, 60), ((2, 1),), clip=0.05),
    Case("sp", "vit_signal", (52,), ((2,),)),
    Case("sp", "vit_volume", (12, 20, 8), ((1, 2, 1),)),
    Case("dp", "vit", (36, 28), ((1, 1),), 2, 2, 7),
    Case("pp", "vit", (36, 28), ((1, 1),) * 2, 1, 2, 5, ("blocks.1",), schedule="1f1b"),
    Case("pp", "vit_mean_registers", (36, 28), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b"),
    # three ranks
    Case("sp", "vit", (36, 28), ((3, 1),)),
    Case("sp", "vit_mean", (28, 16), ((3, 1),)),
    Case("sp", "vit_mean_registers", (36, 28), ((1, 3),), 1, 2, 5),
    Case("pp", "vit_plain", (36, 28), ((1, 1),) * 3, microbatches=2),
    Case("sp+lp", "vit_mean", (36, 28), ((1, 2), (1, 1))),
    Case("sp+pp", "vit", (36, 28), ((2, 1), (1, 1)), 1, 2, 5, ("blocks.0",)),
    Case("sp+pp", "vit", (36, 28), ((1, 2), (1, 1)), 1, 2, 5, ("blocks.1",), recompute=True),
    Case("sp+pp", "vit_mean_registers", (36, 28), ((2, 1), (1, 1)), 1, 2, 5, ("norm",)),
    # four ranks and more
    Case("sp", "vit", (36, 28), ((2, 2),)),
    Case("sp", "vit_plain", (36, 28), ((2, 2),), recompute=True),
    Case("sp", "vit_mean", (20, 12), ((2, 2),)),
    Case("sp", "vit_mean_registers", (36, 28), ((2, 2),), 1, 2, 5),
    Case("sp", "vit_signal", (68,), ((4,),)),
    Case("sp", "vit_volume", (12, 20, 8), ((1, 2, 2),)),
    Case("dp+sp", "vit", (36, 28), ((2, 1),), 2, 2, 7),
    Case("sp+pp", "vit", (36, 28), ((1, 2), (1, 2)), 1, 2, 5, ("blocks.1",)),
    Case("sp+pp", "vit_mean", (36, 28), ((2, 2), (1, 1)), 1, 2, 5),
    Case("sp+pp", "vit", (36, 28), ((2, 1), (1, 2)), 1, 2, 5, ("blocks.1",)),
    Case("sp+pp", "vit_plain", (28, 4), ((1, 2), (2, 1)), 1, 2, 5, ("blocks.1",)),
    Case("sp+pp", "vit_signal", (68,), ((2,), (3,)), 1, 2, 5, ("blocks.1",)),
    Case("sp+pp", "vit_volume", (12, 20, 8), ((1, 2, 1), (1, 1, 2)), 1, 2, 5, ("blocks.1",)),
]


# weights divided by channels: alone, beside every other axis, in some stages only
CHANNELS = [
    Case("none", "resnet18", (33, 35), ((1, 1),), tensor=(2,)),
    Case("none", "odd", (45, 50), ((1, 1),), microbatches=3, batch=7, clip=0.05, tensor=(2,)),
    Case("none", "random", (37, 29), ((1, 1),), 1, 2, 5, recompute=True, tensor=(2,)),
    Case("none", "unet", (37, 29), ((1, 1),), recompute="stage", tensor=(2,)),
    Case("none", "vgg", (50, 34), ((1, 1),), tensor=(2,)),
    Case("none", "vit", (36, 28), ((1, 1),), 1, 2, 5, clip=0.05, tensor=(2,)),
    Case("none", "transformer", (36, 28), ((1, 1),), tensor=(2,)),
    Case("none", "resnet50", (33, 35), ((1, 1),), batch=2, tensor=(2,)),
    Case("none", "hooked", (17, 14), ((1, 1),), 1, 2, 5, tensor=(2,)),
    Case("none", "checkpointed", (17, 14), ((1, 1),), 1, 2, 5, tensor=(2,)),
    Case("none", "moving", (17, 14), ((1, 1),), 1, 2, 5, tensor=(2,)),
    # three ranks, over which most channels do not divide
    Case("none", "odd", (45, 50), ((1, 1),), clip=0.05, tensor=(3,)),
    Case("none", "unet3d", (11, 13, 10), ((1, 1, 1),), 1, 2, 3, tensor=(3,)),
    Case("none", "vit_mean_registers", (36, 28), ((1, 1),), tensor=(3,)),
    Case("pp", "odd", (50, 50), ((1, 1),) * 2, 1, 3, 7, ("4",), tensor=(1, 2)),
    Case("pp", "plain", (37, 29), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b", tensor=(2, 1)),
    Case("pp", "skips", (33, 29), ((1, 1),) * 2, 1, 3, 7, ("2",), clip=0.05, tensor=(1, 2)),
    Case("lp", "vgg", (50, 34), ((1, 1),) * 2, cut=("classifier.0",), tensor=(1, 2)),
    # four ranks
    Case("none", "odd", (45, 50), ((1, 1),), tensor=(4,)),
    Case("sp", "odd", (101, 50), ((2, 1),), clip=0.05, tensor=(2,)),
    Case("sp", "resnet18", (70, 93), ((1, 2),), recompute=True, tensor=(2,)),
    Case("sp", "unet3d", (13, 11, 10), ((1, 2, 1),), 1, 2, 3, tensor=(2,)),
    Case("sp", "vit", (36, 28), ((2, 1),), 1, 2, 5, tensor=(2,)),
    Case("dp", "odd", (45, 50), ((1, 1),), 2, 2, 8, clip=0.05, tensor=(2,)),
    Case("dp", "resnet18", (33, 35), ((1, 1),), 2, 3, 7, sync=True, tensor=(2,)),
    Case("dp", "random", (37, 29), ((1, 1),), 2, 2, 7, recompute=True, tensor=(2,)),
    Case("dp", "moving", (17, 14), ((1, 1),), 2, 2, 7, tensor=(2,)),
    Case("dp", "norms", (17, 14), ((1, 1),), 2, 2, 7, tensor=(2,)),
    Case("pp", "odd", (50, 50), ((1, 1),) * 2, 1, 4, 7, ("2",), tensor=(2, 2)),
    Case("pp", "resnet18", (33, 35), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b", tensor=(1, 3)),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 8, schedule="1f1b", tensor=(2, 2)),
    Case("pp", "vit", (36, 28), ((1, 1),) * 2, 1, 2, 5, ("blocks.1",), tensor=(2, 2)),
    Case("sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), 1, 2, 5, tensor=(1, 2)),
    Case("sp+lp", "vgg", (50, 34), ((2, 1), (1, 1)), cut=("classifier.0",), tensor=(1, 2)),
    Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 5, schedule="mast", tensor=(2, 2)),
    Case("pp", "odd", (64, 64), ((1, 1),) * 3, 1, 2, 7, ("4", "8"), tensor=(1, 2, 1)),
    Case("pp", "swin", (60, 52), ((1, 1),) * 2, 1, 2, 4, tensor=(2, 2)),
    Case("gems", "swin", (60, 52), ((1, 1),) * 2, 1, 2, 4, schedule="mast", tensor=(2, 2)),
    Case("sp", "swin", (60, 52), ((2, 1),), 1, 2, 4, tensor=(2,)),
    Case("dp", "swin", (60, 52), ((1, 1),), 2, 2, 5, clip=0.05, tensor=(2,)),
    Case("pp", "amoebanet_d", (97, 70), ((1, 1),) * 2, 1, 2, 6, schedule="1f1b", tensor=(2, 2)),
    Case("gems", "amoebanet_d", (97, 70), ((1, 1),) * 2, 1, 2, 6, schedule="mast", tensor=(2, 2)),
    Case("pp", "resnet110_v2", (33, 35), ((1, 1),) * 2, microbatches=2, tensor=(1, 3)),
    Case("gems", "resnet110_v2", (33, 35), ((1, 1),) * 2, 1, 2, 3, schedule="mast", tensor=(2, 2)),
    Case("pp", "resnet50", (33, 35), ((1, 1),) * 2, microbatches=2, tensor=(2, 2)),
    Case("sp+pp", "unet", (37, 29), ((2, 1), (1, 1)), 1, 2, 3, ("upsample.1",), tensor=(1, 2)),
    # five ranks, and eight
    Case("sp+pp", "resnet18", (70, 93), ((2, 1), (1, 1)), 1, 2, 5, tensor=(1, 3)),
    Case("gems", "odd", (45, 50), ((1, 1),) * 3, 1, 4, 9, schedule="basic", tensor=(2,) * 3),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), 2, 2, 9, sync=True, tensor=(2,)),
    Case("sp+pp", "unet", (37, 29), ((2, 1), (1, 2)), 1, 2, 3, schedule="1f1b", tensor=(2, 2)),
    Case("pp", "odd", (64, 64), ((1, 1),) * 2, 1, 2, 6, local=(1, 2), tensor=(1, 2)),
]


# each rank works on virtual tiles, one after the other
STREAMED = [
    Case("none", "odd", (101, 50), ((1, 1),), stream=(3, 1)),
    Case("none", "odd", (41, 67), ((1, 1),), 1, 3, 7, clip=0.05, stream=(2, 2)),
    Case("none", "resnet18", (70, 93), ((1, 1),), stream=(2, 2)),
    Case("none", "resnet18", (70, 93), ((1, 1),), 1, 2, recompute=True, stream=(4, 4)),
    Case("none", "unet", (37, 29), ((1, 1),), 1, 2, 3, stream=(2, 2)),
    Case("none", "random", (37, 29), ((1, 1),), 1, 2, 5, recompute=True, stream=(1, 3)),
    Case("none", "random_net", (37, 29), ((1, 1),), stream=(2, 1)),
    Case("none", "vgg", (50, 34), ((1, 1),), recompute="stage", stream=(2, 2)),
    Case("none", "vit", (36, 28), ((1, 1),), 1, 2, 5, stream=(2, 2)),
    Case("none", "vit_volume", (12, 20, 8), ((1, 1, 1),), stream=(1, 2, 2)),
    Case("none", "transformer", (36, 28), ((1, 1),), 1, 2, 5, stream=(2, 2)),
    Case("none", "swin", (60, 52), ((1, 1),), 1, 2, 4, stream=(2, 1)),
    Case("none", "odd_signal", (67,), ((1,),), 1, 2, 5, stream=(3,)),
    Case("none", "odd_volume", (13, 21, 18), ((1, 1, 1),), stream=(2, 1, 2)),
    Case("none", "moving", (17, 14), ((1, 1),), 1, 2, 5, stream=(2, 2)),
    # two ranks
    Case("sp", "odd", (101, 50), ((2, 1),), stream=(2, 2)),
    Case("sp", "resnet18", (70, 93), ((1, 2),), clip=0.05, stream=(2, 2)),
    Case("sp", "unet", (37, 29), ((2, 1),), 1, 2, 3, stream=(1, 2)),
    Case("sp", "random", (37, 29), ((1, 2),), 1, 2, 5, recompute=True, stream=(2, 1)),
    Case("sp", "vgg", (50, 34), ((2, 1),), gather_before="classifier", stream=(1, 2)),
    Case("sp", "vit_mean_registers", (36, 28), ((1, 2),), 1, 2, 5, stream=(2, 1)),
    Case("sp", "odd_volume", (13, 21, 18), ((1, 1, 2),), stream=(2, 1, 1)),
    Case("dp", "odd", (45, 50), ((1, 1),), 2, 2, 8, stream=(2, 2)),
    Case("dp", "random", (37, 29), ((1, 1),), 2, 2, 7, recompute=True, stream=(2, 1)),
    Case("dp", "moving", (17, 14), ((1, 1),), 2, 2, 7, stream=(2, 2)),
    Case("lp", "resnet18", (70, 93), ((1, 1),) * 2, stream=(2, 2)),
    Case("pp", "odd", (50, 50), ((1, 1),) * 2, 1, 4, 7, ("2",), stream=(3, 1)),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b", stream=(2, 2)),
    Case("pp", "skips", (33, 29), ((1, 1),) * 2, 1, 2, 5, ("2",), stream=(2, 2)),
    Case("pp", "vit", (36, 28), ((1, 1),) * 2, 1, 2, 5, ("blocks.1",), stream=(2, 2)),
    Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 5, schedule="mast", stream=(2, 1)),
    # three ranks and more
    Case("sp", "odd", (101, 50), ((3, 1),), order=(2, 0, 1), stream=(1, 2)),
    Case("sp+pp", "odd", (101, 50), ((2, 1), (1, 1)), 1, 3, 6, stream=(1, 2)),
    Case("sp+lp", "resnet18", (70, 93), ((1, 2), (1, 1)), stream=(2, 1)),
    Case("sp+pp", "transformer", (36, 28), ((2, 1), (1, 1)), 1, 2, 5, ("second",), stream=(1, 2)),
    Case("sp", "odd", (101, 50), ((2, 2),), stream=(2, 2)),
    Case("sp", "unet", (37, 29), ((2, 2),), batch=3, stream=(2, 1)),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), 2, 2, 9, stream=(2, 1)),
    Case("sp+pp", "vit", (36, 28), ((2, 1), (1, 2)), 1, 2, 5, ("blocks.1",), stream=(2, 1)),
    Case("sp+pp", "unet3d", (13, 11, 10), ((2, 1, 1), (1, 1, 2)), 1, 2, 3, stream=(1, 2, 1)),
]


LAYOUTS = [
    *(*CASES, *SEGMENTATION, *RECOMPUTED, *GATHERED, *FLATTENED, *RANDOM, *SCHEDULED),
    *(*INTERLEAVED, *MIRRORED, *SYNCED, *SKIPS, *OWN_FORWARD, *CLIPPED, *LOCAL),
    *(*ORDERED, *TOKENS, *VIT, *CHANNELS, *STREAMED),
    *(*EIGHT_RANKS, *SIGNALS, *VOLUMES),
]
