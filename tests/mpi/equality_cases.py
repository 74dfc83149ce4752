"""The layouts, networks and sizes of which every one must give the numbers of one process."""

from __future__ import annotations

from typing import NamedTuple

from spatialdl.layout.placement import Placement
from spatialdl.pipeline.schedule import GEMS


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

    @property
    def placement(self) -> Placement:
        mirrored = self.schedule in GEMS
        more = (self.interleave, mirrored, self.local, self.order, self.tensor, self.stream)
        return Placement(self.data, self.grids, *more)

    def __str__(self) -> str:
        size, *grids = ("x".join(map(str, one)) for one in (self.size, *self.grids))
        others = ((name, getattr(self, name)) for name in self._field_defaults)
        words = [
            f"{name}{'+'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name, value in others
            if value != self._field_defaults[name]
        ]
        return "-".join([self.parallel, self.network, size, *grids, *words])

    @property
    def segments(self) -> bool:
        return self.network in ("unet", "unet3d")


# Any two settings of a layout that are possible together (schedule, recomputation, dims of the
# image, virtual tiles, divided channels, sharded state, statistics of all replicas, clipping,
# divided samples, order of ranks, gathering), and any kind of layout with any schedule and
# recomputation, stand together in one of these rows.
LAYOUTS = [
    # two ranks
    Case("sp", "resnet50", (70, 93), ((2, 1),)),
    Case("sp", "resnet110_v2", (37, 29), ((2, 1),), batch=2),
    Case("lp", "resnet110_v2", (32, 32), ((1, 1),) * 2, batch=2),
    Case("dp", "resnet110_v2", (33, 35), ((1, 1),), 2),
    Case("sp", "unet", (64, 64), ((2, 1),)),
    Case("sp", "resnet18", (70, 93), ((1, 2),), recompute="stage"),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 7, recompute="stage", schedule="1f1b"),
    Case("gems", "skips", (33, 29), ((1, 1),) * 2, 1, 2, 5, recompute="stage", schedule="mast"),
    Case("dp", "odd", (45, 50), ((1, 1),), 2, 2, 8, recompute="stage", sync=True),
    Case("sp", "vgg", (50, 34), ((1, 2),), gather_before="classifier.0", recompute=True),
    Case("sp", "random", (37, 29), ((2, 1),)),
    Case("sp", "random_net", (37, 29), ((2, 1),), recompute=True),
    Case("pp", "resnet18", (70, 93), ((1, 1),) * 2, microbatches=2)._replace(
        recompute=True, schedule="1f1b"
    ),
    Case("dp", "odd", (45, 50), ((1, 1),), 2, 2, 8, schedule="1f1b"),
    Case("pp", "resnet18", (70, 93), ((1, 1),) * 4, microbatches=4)._replace(
        schedule="interleaved", interleave=2
    ),
    Case("gems", "random", (37, 29), ((1, 1),) * 2, 1, 8, 9, schedule="master", times=2),
    Case("sp", "amoebanet_d", (101, 75), ((2, 1),), batch=3),
    # a stage that begins with an operation in place wrote into what it needs once more
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 2, 5, cut=("relu",), recompute="stage"),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 2, 5, cut=("pixels",), recompute="stage"),
    Case("pp", "unet", (37, 29), ((1, 1),) * 2, 1, 2, 3, recompute=True),
    Case("pp", "frozen_start", (37, 29), ((1, 1),) * 2, 1, 2, 5, cut=("1",)),
    Case("sp", "plain", (37, 29), ((2, 1),), 1, 2, 5),
    Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 5, schedule="mast", clip=0.05),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b", order=(1, 0)),
    Case("sp", "transformer", (36, 28), ((2, 1),)),
    Case("sp", "vit_plain", (28, 4), ((1, 2),)),
    Case("sp", "vit_mean", (36, 28), ((1, 2),)),
    Case("sp", "vit_mean_registers", (20, 60), ((2, 1),), clip=0.05),
    Case("sp", "vit_signal", (52,), ((2,),)),
    Case("sp", "vit_volume", (12, 20, 8), ((1, 2, 1),)),
    Case("pp", "vit", (36, 28), ((1, 1),) * 2, 1, 2, 5, cut=("blocks.1",), schedule="1f1b"),
    Case("pp", "vit_mean_registers", (36, 28), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b"),
    Case("none", "random", (37, 29), ((1, 1),), 1, 2, 5, recompute=True, tensor=(2,)),
    Case("none", "unet", (37, 29), ((1, 1),), recompute="stage", tensor=(2,)),
    Case("none", "resnet50", (33, 35), ((1, 1),), batch=2, tensor=(2,)),
    Case("none", "hooked", (17, 14), ((1, 1),), 1, 2, 5, tensor=(2,)),
    Case("none", "checkpointed", (17, 14), ((1, 1),), 1, 2, 5, tensor=(2,)),
    Case("sp", "vgg", (50, 34), ((2, 1),), gather_before="classifier", stream=(1, 2)),
    Case("dp", "random", (37, 29), ((1, 1),), 2, 2, 7, recompute=True, stream=(2, 1)),
    Case("lp", "resnet18", (70, 93), ((1, 1),) * 2, stream=(2, 2)),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b", stream=(2, 2)),
    Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 5, schedule="mast", stream=(2, 1)),
    Case("sp", "odd_signal", (67,), ((2,),), 1, 3, 7, recompute=True),
    Case("pp", "odd_signal", (67,), ((1,),) * 2, 1, 3, 7, schedule="1f1b"),
    Case("dp", "odd_signal", (67,), ((1,),), 2, 2, 5, shard=True),
    Case("sp", "random_volume", (13, 11, 10), ((1, 2, 1),)),
    Case("sp", "unet3d", (13, 11, 10), ((1, 2, 1),), batch=3, gather_before="head"),
    Case("lp", "odd_volume", (13, 21, 18), ((1, 1, 1),) * 2),
    Case("pp", "unet3d", (13, 11, 10), ((1, 1, 1),) * 2, 1, 2, 3, schedule="1f1b"),
    Case("gems", "odd_volume", (13, 21, 18), ((1, 1, 1),) * 2, 1, 2, 5, schedule="mast"),
    Case("dp", "odd_volume", (13, 21, 18), ((1, 1, 1),), 2, 2, 5, sync=True),
    Case("dp", "resnet18", (33, 35), ((1, 1),), 2, 2, recompute=True, shard=True),
    Case("dp", "resnet18", (33, 35), ((1, 1),), 2, 3, 7, sync=True, shard=True),
    Case("dp", "frozen_start", (37, 29), ((1, 1),), 2, 2, 5, shard=True),
    # three ranks
    Case("sp+lp", "random", (37, 29), ((1, 2), (1, 1)), cut=("block1",)),
    Case("sp+pp", "vgg", (50, 34), ((2, 1), (1, 1)), 1, 3, 6, ("features.3",))._replace(
        gather_before="classifier", schedule="1f1b"
    ),
    Case("sp+gems", "random", (37, 29), ((1, 1), (2, 1)), 1, 4, 5, schedule="master", times=2),
    Case("sp+pp", "skips", (33, 29), ((2, 1), (1, 1)), 1, 2, 5, ("2",), schedule="1f1b"),
    Case("pp", "twice", (37, 29), ((1, 1),) * 3, 1, 2, 3, cut=("second", "third")),
    Case("sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), microbatches=2, clip=0.05),
    Case("sp+gems", "plain", (37, 29), ((2, 1), (1, 1)), 1, 2, 5, schedule="basic", clip=0.05),
    Case("lp", "random", (37, 29), ((1, 1),) * 2, batch=5, local=(1, 2)),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 8, schedule="1f1b", local=(1, 2)),
    Case("pp", "odd", (64, 64), ((1, 1),) * 2, 1, 2, 5, recompute=True, local=(1, 2)),
    Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 9, schedule="basic", local=(1, 2)),
    Case("sp+pp", "odd", (101, 50), ((2, 1), (1, 1)), 1, 3, 6, order=(2, 0, 1)),
    Case("sp+gems", "odd", (101, 50), ((2, 1), (1, 1)), 1, 4, 6, schedule="mast", order=(1, 2, 0)),
    Case(
        "pp", "skips", (33, 29), ((1, 1),) * 2, 1, 2, 5, cut=("2",), local=(1, 2), order=(2, 1, 0)
    ),
    Case("pp", "vit_plain", (36, 28), ((1, 1),) * 3, microbatches=2),
    Case("sp+lp", "vit_mean", (36, 28), ((1, 2), (1, 1))),
    Case("sp+pp", "vit", (36, 28), ((1, 2), (1, 1)), 1, 2, 5, ("blocks.1",), recompute=True),
    Case("sp+pp", "vit_mean_registers", (36, 28), ((2, 1), (1, 1)), 1, 2, 5, ("norm",)),
    Case("none", "unet3d", (11, 13, 10), ((1, 1, 1),), 1, 2, 3, tensor=(3,)),
    Case("none", "vit_mean_registers", (36, 28), ((1, 1),), tensor=(3,)),
    Case("pp", "plain", (37, 29), ((1, 1),) * 2, 1, 3, 7, schedule="1f1b", tensor=(2, 1)),
    Case("pp", "skips", (33, 29), ((1, 1),) * 2, 1, 3, 7, cut=("2",), clip=0.05, tensor=(1, 2)),
    Case("lp", "vgg", (50, 34), ((1, 1),) * 2, cut=("classifier.0",), tensor=(1, 2)),
    Case("sp", "odd", (101, 50), ((3, 1),), order=(2, 0, 1), stream=(1, 2)),
    Case("sp+lp", "resnet18", (70, 93), ((1, 2), (1, 1)), stream=(2, 1)),
    Case("sp+pp", "transformer", (36, 28), ((2, 1), (1, 1)), 1, 2, 5, ("second",), stream=(1, 2)),
    Case("sp", "odd_signal", (103,), ((3,),), clip=0.05),
    Case("sp+gems", "odd_signal", (101,), ((2,), (1,)), 1, 4, 6, schedule="mast"),
    Case("sp+lp", "odd_volume", (13, 21, 18), ((2, 1, 1), (1, 1, 1))),
    Case("sp+pp", "odd_volume", (13, 21, 18), ((1, 2, 1), (1, 1, 1)), 1, 3, 6, recompute="stage"),
    Case("sp+pp", "unet3d", (13, 11, 10), ((2, 1, 1), (1, 1, 1)), 1, 2, 3),
    Case("sp+pp", "random_volume", (13, 11, 10), ((1, 1, 2), (1, 1, 1)), 1, 3, 7, ("voxels",)),
    Case("sp+gems", "odd_volume", (13, 21, 18), ((2, 1, 1), (1, 1, 1)), 1, 4, 6, schedule="basic"),
    Case("pp", "odd_volume", (13, 21, 18), ((1, 1, 1),) * 2, 1, 2, 5, local=(1, 2)),
    Case("dp", "odd", (64, 64), ((1, 1),), 3, 1, 9, clip=0.05, shard=True, order=(2, 0, 1)),
    # four ranks
    Case("sp+pp", "vit_signal", (68,), ((1,), (3,)), 1, 2, 5, ("blocks.1",)),
    Case("sp+pp", "odd", (64, 64), ((3, 1), (1, 1)), 1, 2, 6, ("4",)),
    Case("dp+sp", "vgg", (50, 34), ((1, 2),), 2, gather_before="classifier"),
    Case("sp+lp", "unet", (37, 29), ((1, 2), (2, 1)), batch=3, cut=("head",))._replace(
        gather_before="decoder.2"
    ),
    Case("sp+pp", "odd", (101, 50), ((2, 1),) * 4, 1, 2, 5, cut=("1", "3", "5"))._replace(
        schedule="interleaved", interleave=2
    ),
    Case("sp+gems", "odd", (101, 50), ((2, 1),) * 2, microbatches=2, schedule="basic"),
    Case("dp+gems", "random", (37, 29), ((1, 1),) * 2, 2, 4, 9, schedule="mast"),
    Case("dp+sp", "odd", (41, 67), ((2, 1),), 2, 3, 5, recompute=True, sync=True),
    Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 3, 7, schedule="1f1b", sync=True),
    Case("dp+gems", "odd", (64, 64), ((1, 1),) * 2, 2, 4, 11, schedule="basic", sync=True),
    Case("dp+pp", "plain", (37, 29), ((1, 1),) * 2, 2, 1, 5, clip=0.05),
    Case("sp+lp", "odd", (64, 64), ((1, 2), (1, 1)), batch=5, cut=("10",), local=(1, 2)),
    Case("sp+pp", "random", (37, 29), ((2, 1), (1, 1)), 1, 3, 7, recompute="stage", local=(1, 2)),
    Case("sp+gems", "odd", (64, 64), ((2, 1), (1, 1)), 1, 2, 6, schedule="mast", local=(1, 2)),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), 2, 2, 9, sync=True, order=(0, 2, 1, 3)),
    Case("dp+pp", "random", (37, 29), ((1, 1),) * 4, 2, 4, 9)._replace(
        schedule="interleaved", interleave=2, order=(2, 0, 3, 1)
    ),
    Case("sp+pp", "vit_plain", (28, 4), ((1, 2), (2, 1)), 1, 2, 5, ("blocks.1",)),
    Case("sp+pp", "vit_volume", (12, 20, 8), ((1, 2, 1), (1, 1, 2)), 1, 2, 5, ("blocks.1",)),
    Case("sp", "vit", (36, 28), ((2, 1),), 1, 2, 5, tensor=(2,)),
    Case("dp", "norms", (17, 14), ((1, 1),), 2, 2, 7, tensor=(2,)),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 8, schedule="1f1b", tensor=(2, 2)),
    Case("sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), 1, 2, 5, tensor=(1, 2)),
    Case("sp+lp", "vgg", (50, 34), ((2, 1), (1, 1)), cut=("classifier.0",), tensor=(1, 2)),
    Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 5, schedule="mast", tensor=(2, 2)),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), 2, 2, 9, stream=(2, 1)),
    Case("dp+sp", "odd_signal", (67,), ((2,),), 2, 2, 9, sync=True),
    Case("dp+sp", "odd_volume", (13, 21, 18), ((1, 2, 1),), 2, 2, 9, clip=0.05, shard=True),
    Case("dp+pp", "random", (37, 29), ((1, 1),) * 2, 2, 2, 8, cut=("block1",))._replace(
        recompute="stage", shard=True
    ),
    Case("dp", "odd", (45, 50), ((1, 1),), 2, 1, 5, clip=0.05, shard=True, tensor=(2,)),
    # five ranks and more, run where there are so many
    Case("sp+pp", "vit_signal", (68,), ((2,), (3,)), 1, 2, 5, ("blocks.1",)),
    Case("pp", "odd", (64, 64), ((1, 1),) * 2, 1, 2, 6, local=(1, 2), tensor=(1, 2)),
    Case("sp+pp", "odd", (101, 50), ((2, 2), (2, 1)), microbatches=2, cut=("4",)),
    Case("dp+sp+lp", "odd", (64, 64), ((2, 1), (1, 1)), 2),
    Case("dp+sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), 2, 3, 9, schedule="1f1b"),
    Case("dp+sp+gems", "odd", (64, 64), ((2, 1), (1, 1)), 2, 2, 7, schedule="mast"),
    Case("dp+sp+lp", "odd", (64, 64), ((2, 1), (1, 1)), 2, sync=True),
    Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 2, 9, local=(1, 2)),
    Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 2, 5, sync=True, local=(1, 2)),
    Case("sp+pp", "plain", (37, 29), ((2, 2), (1, 1)), 1, 2, 5, ("body.0",), local=(1, 2)),
    Case("gems", "odd", (45, 50), ((1, 1),) * 3, 1, 4, 9, schedule="basic", tensor=(2, 2, 2)),
    Case("dp+sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), 2, 2, 5, clip=0.05, shard=True),
    Case("dp+pp", "random", (37, 29), ((1, 1),) * 2, 2, 2, 8, cut=("block1",))._replace(
        shard=True, tensor=(1, 2)
    ),
    Case("dp+sp+pp", "random", (37, 29), ((2, 1), (1, 2)), 2, 2, 9, order=(7, 0, 2, 5, 1, 4, 6, 3)),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), 2, 2, 9, sync=True, tensor=(2,)),
    Case("sp+pp", "unet", (37, 29), ((2, 1), (1, 2)), 1, 2, 3, schedule="1f1b", tensor=(2, 2)),
    Case("sp", "odd", (101, 50), ((4, 2),)),
    Case("sp+pp", "odd", (70, 93), ((2, 2),) * 2, 1, 3, 6, cut=("4",)),
    Case("dp+sp+pp", "random", (37, 29), ((2, 1), (1, 2)), 2, 2, 9, ("block1",), schedule="1f1b"),
    Case("dp+sp+gems", "odd", (64, 64), ((1, 2), (2, 1)), 2, 2, 7, schedule="mast"),
    Case("pp", "plain", (37, 29), ((1, 1),) * 8, 1, 5, 6, schedule="1f1b"),
    Case("sp", "odd_signal", (403,), ((8,),), batch=3),
    Case("sp", "odd_volume", (13, 21, 18), ((2, 2, 2),)),
    Case("sp", "unet3d", (13, 11, 10), ((2, 2, 2),), batch=2),
    Case("sp+pp", "unet3d", (13, 11, 10), ((1, 2, 2), (2, 2, 1)), 1, 2, 3),
    Case("dp+sp", "odd", (41, 67), ((1, 2),), 2, 2, 9, sync=True, shard=True, tensor=(2,)),
]

SLOW = [
    # ranks without pixels in the last layers, where BatchNorm sees one pixel a sample: more samples
    Case("sp", "resnet18", (32, 32), ((1, 2),), batch=8),
    # a flattened map stays split, also between stages
    Case("sp", "vgg", (50, 34), ((2, 1),)),
    Case("pp", "resnet110_v2", (33, 35), ((1, 1),) * 6, 1, 5, 5)._replace(
        schedule="interleaved", interleave=3
    ),
    # replicas without samples
    Case("dp", "odd", (45, 50), ((1, 1),), 2, 3, 5, sync=True),
    # after pooling every rank of the first stage holds a copy
    Case("sp+pp", "resnet18", (64, 64), ((2, 1), (1, 1)), microbatches=2, cut=("flatten",)),
    Case("sp+gems", "amoebanet_d", (101, 75), ((2, 1), (1, 1)), 1, 2, 6, schedule="mast"),
    # more replicas than samples
    Case("dp", "odd", (45, 50), ((1, 1),), 3, 1, 2, clip=0.05),
    Case("sp", "vit", (36, 28), ((3, 1),)),
    Case("dp", "resnet18", (33, 35), ((1, 1),), 3, 2, 7, recompute=True, clip=0.05, shard=True),
    Case("sp", "resnet18", (32, 32), ((2, 2),), batch=8),
    Case("sp", "unet", (21, 19), ((2, 2),)),
    Case("sp", "resnet50", (64, 64), ((2, 2),), recompute=True),
    Case("sp+pp", "vgg", (50, 34), ((1, 2),) * 2, microbatches=2)._replace(
        cut=("classifier.1",), schedule="1f1b"
    ),
    Case("sp+pp", "resnet18", (70, 93), ((1, 2), (2, 1)) * 2, microbatches=2)._replace(
        schedule="interleaved", interleave=2
    ),
    Case("dp+sp", "resnet18", (32, 32), ((2, 1),), 2, 1, 8, sync=True),
    Case("dp+sp", "odd", (45, 50), ((1, 2),), 2, 1, 1, clip=0.05),
    Case("pp", "resnet18", (33, 35), ((1, 1),) * 3, 1, 2, 3, local=(1, 2, 1)),
    Case("sp", "unet", (21, 19), ((2, 2),), clip=0.05, order=(3, 0, 2, 1)),
    # the grid changes: of channels-last maps ("last"), of tokens with others beside them
    Case("sp+pp", "transformer", (36, 28), ((2, 1), (1, 2)), 1, 2, 5, ("second",)),
    Case("sp+pp", "transformer", (36, 28), ((1, 2), (2, 1)), 1, 2, 5, ("last",), schedule="1f1b"),
    Case("sp", "vit_mean", (20, 12), ((2, 2),)),
    Case("pp", "swin", (60, 52), ((1, 1),) * 2, microbatches=2, tensor=(2, 2)),
    Case("pp", "amoebanet_d", (97, 70), ((1, 1),) * 2, 1, 2, 6, schedule="1f1b", tensor=(2, 2)),
    Case("sp", "odd", (101, 50), ((2, 2),), stream=(2, 2)),
    Case("sp+pp", "vit", (36, 28), ((2, 1), (1, 2)), 1, 2, 5, ("blocks.1",), stream=(2, 1)),
    # a sharded stage that begins with an operation in place
    Case("dp+pp", "random", (37, 29), ((1, 1),) * 2, 2, 2, 5, cut=("relu",), shard=True),
    Case("sp+lp", "resnet18", (70, 93), ((2, 2), (1, 1))),
    # what jumps over a stage
    Case("sp+pp", "unet", (33, 41), ((2, 1), (1, 1), (2, 1)), 1, 2, 3, ("encoder.3", "upsample.2")),
    Case("sp+pp", "transformer", (36, 28), ((2, 1), (1, 2), (1, 1)), 1, 2, 5)._replace(
        cut=("last", "second"), schedule="1f1b"
    ),
    Case("sp+pp", "resnet18", (70, 93), ((2, 2), (1, 2)), microbatches=2),
]
"""Left to the longer proof: deep networks, and sizes and grids that could be a trap."""
