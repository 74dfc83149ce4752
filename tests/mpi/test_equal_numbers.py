"""The first promise: every layout gives the numbers of one process, to 1e-10 in float64.

The reference is plain PyTorch in a loop, without a line of ours: it accumulates over the same
slices of the batch, micro-batch by micro-batch, within it replica by replica. Only where a network
draws random numbers it does so by the same keys.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import from_local
from spatialdl.data.format import UNLABELLED
from spatialdl.layout import even_bounds
from spatialdl.mesh import Mesh, Placement
from spatialdl.models import amoebanet_d, resnet18, resnet50, resnet110_v2, unet
from spatialdl.pipeline.placed import Microbatch
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.pipeline.schedule import GEMS, make_schedule
from spatialdl.random import keyed, scope
from spatialdl.training.tasks import segmentation_loss

STEPS = 4
SEED = 11
TOLERANCE = 1e-10


class OddNet(nn.Sequential):
    """Everything at once: dilation, groups, bias, even kernels, ceil mode, average pooling."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1, ceil_mode=True),
            nn.Conv2d(8, 12, (4, 2), padding=(2, 1), groups=4),
            nn.Sigmoid(),
            nn.AvgPool2d(3, 2, 1, count_include_pad=False),
            nn.Conv2d(12, 12, 3, padding=2, dilation=2),
            nn.BatchNorm2d(12, momentum=None),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        )


def tame_resnet50() -> nn.Module:
    """ResNet-50 whose residual branches start small, as is usual.

    Without it one process alone, its input changed by 3e-16, ends 4 steps later 1e-7 away: no
    layout could be told from another.
    """
    model = resnet50(num_classes=5, width=8)
    for name, layer in model.named_modules():
        if name.endswith("bn3") and isinstance(layer, nn.BatchNorm2d):
            nn.init.constant_(layer.weight, 0.2)
    return model


def vgg() -> nn.Module:
    """The head flattens a map, so it needs all of it; for images of 50 x 34."""
    features = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(4, ceil_mode=True),
    )
    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 7 * 5, 16), nn.ReLU(), nn.Linear(16, 5))
    return nn.Sequential(OrderedDict(features=features, classifier=head))


class DropPath(nn.Module):
    """Stochastic depth as in transformers."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 0.6 + torch.rand((len(x), 1, 1, 1), dtype=x.dtype, device=x.device)
        return x.div(0.6) * keep.floor_()


class RandomBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.drop, self.path = nn.BatchNorm2d(8), nn.Dropout(0.2), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.conv1(x)).relu())
        return x + self.path(self.conv2(y))


class RandomChain(nn.Sequential):
    """Drops pixels, channels, whole branches, and in its head features."""

    def __init__(self) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(3, 8, 3, stride=2, padding=1),
                relu=nn.ReLU(inplace=True),
                channels=nn.Dropout2d(0.3),
                conv2=nn.Conv2d(8, 8, 3, padding=1),
                pixels=nn.Dropout(0.3, inplace=True),
                block1=RandomBlock(),
                block2=RandomBlock(),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                features=nn.Dropout(0.2),
                linear=nn.Linear(8, 5),
            )
        )


class RandomNet(nn.Module):
    """The same with a forward of its own; its blocks, not its layers, run again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.drop = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Dropout2d(0.3)
        self.blocks = nn.ModuleList([RandomBlock(), RandomBlock()])
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.linear(F.dropout(x.mean((2, 3)), 0.2, self.training))


class Fork(nn.Module):
    """Gives what it made, the image itself, and numbers that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.conv(x).relu(), x, torch.arange(len(x))


class Along(nn.Module):
    """Works on one tensor, which others pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, both: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y, *others = both
        return (y + self.norm(self.conv(y)).tanh(), *others)


class Meet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(9, 6, 3), nn.Linear(6, 5)

    def forward(self, both: tuple[Tensor, ...]) -> Tensor:
        y, image, numbers = both
        x = torch.cat([F.interpolate(y, image.shape[-2:], mode="bilinear"), image], 1)
        return self.linear(self.conv(x).mean((2, 3))) + numbers.view(-1, 1)


class Plain(nn.Module):
    """A forward of its own: a residual over everything, weights outside of modules, a frozen part.

    Attributes:
        scoped: draw random numbers by the names under which stages draw them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.unused = nn.Linear(3, 3)
        self.drop = nn.Dropout2d(0.3)
        self.scale = nn.Parameter(torch.full((6, 1, 1), 0.7))
        self.frozen = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Tanh())
        self.frozen.requires_grad_(False)
        self.body = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(6, 5)
        self.scoped = False

    def dropped(self, x: Tensor, name: str) -> Tensor:
        with scope(name) if self.scoped else nullcontext():
            return self.drop(x)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.norm(self.stem(x)).relu()
        x = self.frozen(self.dropped(x * self.scale, "drop"))
        for layer in self.body:
            x = x + layer(x).sigmoid()
        x = self.dropped(x, "drop#1") + skip
        return self.head(x.mean((2, 3)))


class Twice(nn.Module):
    """The first map is taken by both of the other layers, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(channels, 5, 3, padding=1) for channels in (3, 5, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        y = self.second(x).tanh() * x
        return (self.third(y) * x).mean((2, 3))


class FrozenStart(nn.Sequential):
    """Nothing to learn in the first half."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6)).requires_grad_(False),
            nn.Conv2d(6, 6, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 5),
        )


NETWORKS = {
    "plain": Plain,
    "twice": Twice,
    "frozen_start": FrozenStart,
    "amoebanet_d": lambda: amoebanet_d(num_classes=5, layers=3, filters=16),
    "skips": lambda: nn.Sequential(Fork(), Along(), Along(), Along(), Meet()),
    "random": RandomChain,
    "random_net": RandomNet,
    "unet": lambda: unet(num_classes=5, width=4, depth=3),
    "vgg": vgg,
    "resnet18": lambda: resnet18(num_classes=5, width=8),
    "resnet50": tame_resnet50,
    "resnet110_v2": lambda: resnet110_v2(num_classes=5),
    "odd": OddNet,
}


class Case(NamedTuple):
    """One row of the table."""

    parallel: str
    network: str
    size: tuple[int, int]
    grids: tuple[tuple[int, int], ...]
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
    balance: str = "time"
    local: tuple[int, ...] = ()
    backend: str | None = None
    shard: bool = False

    @property
    def placement(self) -> Placement:
        mirrored = self.schedule in GEMS
        return Placement(self.data, self.grids, self.interleave, mirrored, self.local)

    def __str__(self) -> str:
        grids = "-".join(f"{rows}x{cols}" for rows, cols in self.grids)
        height, width = self.size
        return (
            f"{self.parallel}-{self.network}-{height}x{width}-{grids}-d{self.data}"
            f"-m{self.microbatches}-b{self.batch}"
            + "-recompute" * bool(self.recompute)
            + "-stage" * (self.recompute == "stage")
            + f"-{self.schedule}" * (self.schedule != "gpipe")
            + f"{self.interleave}" * (self.interleave > 1)
            + "-sync" * self.sync
            + "-clip" * bool(self.clip)
            + "-local" * bool(self.local)
            + "+".join(map(str, self.local))
            + f"-{self.balance}" * (self.balance != "time")
            + f"-{self.backend}" * (self.backend is not None)
            + "-shard" * self.shard
        )

    @property
    def segments(self) -> bool:
        return self.network == "unet"


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
    )
]


ZERO_BUBBLE = [
    case._replace(schedule="zero_bubble")
    for case in (
        Case("none", "odd", (45, 50), ((1, 1),), microbatches=3, batch=7),
        Case("sp", "odd", (41, 67), ((2, 1),), microbatches=2, batch=7),
        Case("pp", "odd", (50, 50), ((1, 1),) * 2, microbatches=5, batch=7, cut=("2",)),
        Case("pp", "resnet18", (70, 93), ((1, 1),) * 2, microbatches=2, recompute=True),
        Case("pp", "skips", (33, 29), ((1, 1),) * 2, 1, 3, 7, ("2",)),
        Case("sp+pp", "resnet18", (70, 93), ((2, 1), (1, 1)), microbatches=4, batch=6),
        Case("sp+pp", "odd", (101, 50), ((1, 1), (2, 1)), microbatches=4, batch=9, cut=("4",)),
        Case("sp+pp", "vgg", (50, 34), ((2, 1), (1, 1)), 1, 3, 6, ("features.3",), "classifier"),
        Case("sp+pp", "random", (37, 29), ((2, 1), (1, 1)), 1, 3, 7, ("block1",), recompute=True),
        Case("pp", "random", (37, 29), ((1, 1),) * 3, 1, 5, 7, ("conv2", "block2"), "", "stage"),
        Case("pp", "odd", (50, 50), ((1, 1),) * 4, microbatches=6, batch=9),
        Case("sp+pp", "odd", (101, 50), ((2, 1), (2, 1)), microbatches=3, batch=6, recompute=True),
        Case("sp+pp", "resnet18", (101, 50), ((2, 1), (1, 1), (1, 1)), microbatches=4, batch=6),
        Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 3, 7),  # some have none
        Case("dp+pp", "odd", (64, 64), ((1, 1),) * 2, 2, 3, 8, recompute="stage", sync=True),
        Case("sp+pp", "odd", (70, 93), ((2, 2), (1, 1)), microbatches=3),
        Case("dp+sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), 2, 3, 9, recompute=True),
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
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 2, 5, ("relu",), recompute="stage"),
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 2, 5, ("pixels",), recompute="stage"),
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
        Case("pp", "plain", (37, 29), ((1, 1),) * 2, 1, 3, 7, balance="measured"),
        Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 5, schedule="mast"),
        Case("sp+pp", "odd", (64, 64), ((2, 1), (1, 1)), 1, 2, balance="memory"),
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
    Case("pp", "random", (37, 29), ((1, 1),) * 2, 1, 3, 8, schedule="zero_bubble", local=(1, 2)),
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


BACKENDS = [
    case._replace(backend=backend)
    for backend in ("mpi4py", "gloo")
    for case in (
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, batch=5),
        Case("gems", "plain", (37, 29), ((1, 1),) * 2, 1, 2, 5, schedule="mast"),
        Case("sp+pp", "resnet18", (70, 93), ((2, 1), (1, 1)), microbatches=2),  # a stage of one
        Case("gems", "plain", (37, 29), ((1, 1),) * 3, 1, 4, 5, schedule="mast"),
    )
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
        Case("dp", "odd", (45, 50), ((1, 1),), data=2, batch=5, backend="gloo"),
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
    )
]


class Outcome(NamedTuple):
    losses: list[float]
    state: dict[str, Tensor]


def images_and_labels(case: Case, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(case.batch, 3, *case.size, dtype=torch.float64, generator=draw)
    if not case.segments:
        return images, torch.randint(5, (case.batch,), generator=draw)
    masks = torch.randint(5, (case.batch, *case.size), generator=draw)
    masks[torch.rand(masks.shape, generator=draw) < 0.2] = UNLABELLED
    return images, masks


def network(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return NETWORKS[case.network]().double()


def optimiser(parameters: object) -> torch.optim.Optimizer:
    trained = list(parameters) or [nn.Parameter(torch.empty(0))]  # type: ignore[call-overload]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9)


def slices(case: Case) -> list[list[tuple[int, int]]]:
    """Per micro-batch, per replica: the samples [start, stop) of the batch."""
    result = []
    for start, stop in pairwise(even_bounds(case.batch, case.microbatches)):
        cuts = even_bounds(stop - start, case.data)
        result.append([(start + a, start + b) for a, b in pairwise(cuts)])
    return result


def forward(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, Plain):
        model.scoped = True
    if not isinstance(model, RandomChain):
        return model(x)
    for name, layer in model.named_children():
        with scope(name):
            x = layer(x)
    return x


@cache
def reference(case: Case) -> Outcome:
    model = network(case)
    optimizer = optimiser(model.parameters())
    losses = []
    for step in range(STEPS):
        images, labels = images_and_labels(case, step)
        optimizer.zero_grad()
        total = 0.0
        pieces = [piece for row in slices(case) for piece in row]
        for number, (start, stop) in enumerate(pieces):
            if stop > start:
                share = (stop - start) / case.batch
                with keyed(SEED, step, number):
                    output = forward(model, images[start:stop])
                loss = F.cross_entropy(output, labels[start:stop], ignore_index=255) * share
                loss.backward()
                total += loss.item()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        losses.append(total)
    return Outcome(losses, model.state_dict())


def parallel(case: Case, world: MPI.Intracomm) -> Outcome:
    pipeline = Pipeline(
        network(case),
        case.placement,
        make_schedule(case.schedule, case.placement, case.microbatches, case.times),
        world,
        segmentation_loss if case.segments else F.cross_entropy,
        (3, *case.size),
        case.cut or None,
        balance=case.balance,
        gather_before=case.gather_before or (),
        recompute={True: "block", False: "none"}.get(case.recompute, case.recompute),
        sync_batchnorm=case.sync,
        seed=SEED,
        backend=case.backend,
        shard_state=case.shard,
    )
    optimizer = optimiser(pipeline.parameters())
    losses = []
    for step in range(STEPS):
        images, labels = images_and_labels(case, step)
        microbatches = []
        for number, row in enumerate(slices(case)):
            start, stop = row[pipeline.replica]
            first, last = pipeline.first(number), pipeline.last(number)
            microbatches.append(
                Microbatch(
                    stop - start,
                    (stop - start) / case.batch,
                    own_tile(case, first, images[start:stop]) if first else None,
                    own_target(case, last, labels[start:stop]) if last else None,
                )
            )
        losses.append(world.allreduce(pipeline.train_step(microbatches, step)))
        if case.clip:
            pipeline.clip(case.clip)
        optimizer.step()
    return Outcome(losses, pipeline.state_dict())


def own_tile(case: Case, mesh: Mesh, images: Tensor) -> Tensor:
    r0, r1, c0, c1 = mesh.box(case.size)
    return images[..., r0:r1, c0:c1].clone()


def own_target(case: Case, mesh: Mesh, target: Tensor) -> Tensor:
    if not case.segments or mesh.grid == (1, 1):
        return target
    return from_local(own_tile(case, mesh, target), mesh, case.size)


@pytest.mark.parametrize(
    "case",
    CASES
    + SEGMENTATION
    + RECOMPUTED
    + GATHERED
    + RANDOM
    + SCHEDULED
    + ZERO_BUBBLE
    + INTERLEAVED
    + MIRRORED
    + [*SYNCED, *SKIPS, *OWN_FORWARD, *CLIPPED, *LOCAL],
    ids=str,
)
def test_equals_one_process(case: Case, world: MPI.Intracomm) -> None:
    check_equality(case, world)


@pytest.mark.parametrize("case", BACKENDS + SHARDED, ids=str)
def test_equals_one_process_over_a_backend(
    case: Case, world: MPI.Intracomm, ends_process_group: None
) -> None:
    check_equality(case, world)


def check_equality(case: Case, world: MPI.Intracomm) -> None:
    if case.placement.world_size != world.size:
        pytest.skip(f"needs {case.placement.describe()}")
    ours = parallel(case, world)
    # statistics over all replicas are those of one process that does not cut micro-batches
    plain = reference(case._replace(data=1) if case.sync else case)
    assert ours.losses == pytest.approx(plain.losses, abs=TOLERANCE)
    for name, value in ours.state.items():
        difference = (value.double() - plain.state[name].double()).abs().max()
        assert difference <= TOLERANCE, f"{name} differs by {difference}"
    names = set().union(*world.allgather(list(ours.state)))
    assert names == set(plain.state), "the stages together must hold the whole state dict"
