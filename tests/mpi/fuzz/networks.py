"""Random networks: chains and graphs of blocks, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mpi.fuzz.blocks import BLOCKS, CONV, MAX_POOL, TWICE, WIDTH, mean

ADAPTIVE = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def network(
    num_classes: int,
    in_channels: int,
    seed: int,
    kind: str,
    head: str,
    leave_out: Sequence[str] = (),
    dims: int = 2,
) -> nn.Module:
    """The network of a seed.

    Args:
        kind: "chain", an `nn.Sequential`, or "graph", with a forward of its own.
        head: "labels", or "masks" for an output as large as the image.
        leave_out: names of blocks and connections that a layout does not take.
        dims: spatial dims of the images.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    stem = nn.Sequential(CONV[dims](in_channels, WIDTH, 3, padding=1), nn.ReLU(inplace=True))
    blocks = drawn(rng, [name for name in BLOCKS if name not in leave_out], dims)
    last = [CONV[dims](WIDTH, WIDTH, 3, padding=1), nn.Tanh()]
    ends = Pixels(num_classes, dims) if head == "masks" else Labels(num_classes)
    if kind == "chain" and head == "labels":
        return nn.Sequential(*stem, *blocks, *last, ADAPTIVE[dims](1), nn.Flatten(), ends.fc)
    joins = [name for name in JOINS if name not in leave_out]
    return Graph(stem, [*blocks, nn.Sequential(*last)], ends, joins, rng, dims)


def drawn(rng: random.Random, names: Sequence[str], dims: int) -> list[nn.Module]:
    """Blocks; one class at least comes twice, so that there is something to recompute."""
    chosen = rng.choices(names, k=rng.randint(2, 5))
    chosen += [rng.choice(TWICE)] * 2
    rng.shuffle(chosen)
    stride = rng.choice(("none", "conv", "pool"))
    blocks: list[nn.Module] = []
    for name in chosen:
        if name == "Overwriting":  # what a convolution gives, no backward needs
            blocks.append(CONV[dims](WIDTH, WIDTH, 1))
        blocks.append(BLOCKS[name](rng, dims))
    if stride == "conv":
        blocks.insert(rng.randint(0, 2), CONV[dims](WIDTH, WIDTH, 3, stride=2, padding=1))
    elif stride == "pool":
        blocks.insert(rng.randint(0, 2), MAX_POOL[dims](3, 2, 1, ceil_mode=rng.random() < 0.5))
    return blocks


class Graph(nn.Module):
    """Blocks one after another, with connections that skip some of them."""

    def __init__(
        self,
        stem: nn.Module,
        blocks: list[nn.Module],
        ends: nn.Module,
        joins: Sequence[str],
        rng: random.Random,
        dims: int,
    ) -> None:
        super().__init__()
        self.stem, self.blocks, self.ends = stem, nn.ModuleList(blocks), ends
        self.scale = nn.Parameter(torch.full((WIDTH, *(1,) * dims), 0.8))
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH).view(-1, *(1,) * dims))
        self.skips = {n: rng.randint(0, n) for n in range(1, len(blocks)) if rng.random() < 0.4}
        self.how = {n: rng.choice(joins) for n in self.skips}

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image) * self.scale + self.shift
        seen = [x]
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in self.skips:
                other = seen[self.skips[number]]
                if other.shape != x.shape:
                    other = F.interpolate(other, x.shape[2:], mode=MODES[x.dim() - 2])
                x = JOINS[self.how[number]](x, other)
            seen.append(x)
        return self.ends(x, image) if isinstance(self.ends, Pixels) else self.ends(x)


def _in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x * 0.5
    z += y
    return z


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "detached": lambda x, y: x + 0.5 * y.detach(),
    "times": lambda x, y: x * y.sigmoid(),
    "inplace": _in_place,
}


class Labels(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(mean(x))


class Pixels(nn.Module):
    def __init__(self, classes: int, dims: int) -> None:
        super().__init__()
        self.conv = CONV[dims](WIDTH, classes, 1)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        return F.interpolate(self.conv(x), image.shape[2:], mode=MODES[x.dim() - 2])


# --- losses of a user's


def summed(output: Tensor, target: Tensor) -> Tensor:
    """Counts a large slice more than its samples do."""
    return 0.1 * F.cross_entropy(output, target, reduction="none").square().sum()


def squared(output: Tensor, target: Tensor) -> Tensor:
    """A mean over all pixels, those without a class too."""
    return F.cross_entropy(output, target, ignore_index=255, reduction="none").square().mean()
