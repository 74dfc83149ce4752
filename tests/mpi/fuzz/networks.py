"""Random networks: chains and graphs of blocks, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 6
"""Channels of all blocks, so that any two can follow one another or be added."""


def network(
    num_classes: int,
    in_channels: int,
    seed: int,
    kind: str,
    head: str,
    leave_out: Sequence[str] = (),
) -> nn.Module:
    """The network of a seed.

    Args:
        kind: "chain", an `nn.Sequential`, or "graph", with a forward of its own.
        head: "labels", or "masks" for an output as large as the image.
        leave_out: names of blocks that a layout does not take.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    stem = nn.Sequential(nn.Conv2d(in_channels, WIDTH, 3, padding=1), nn.ReLU(inplace=True))
    blocks = drawn(rng, [name for name in BLOCKS if name not in leave_out])
    last = [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Tanh()]
    ends = Pixels(num_classes) if head == "masks" else Labels(num_classes)
    if kind == "chain" and head == "labels":
        return nn.Sequential(*stem, *blocks, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), ends.fc)
    return Graph(stem, [*blocks, nn.Sequential(*last)], ends, rng)


def drawn(rng: random.Random, names: Sequence[str]) -> list[nn.Module]:
    """Blocks; one class at least comes twice, so that there is something to recompute."""
    chosen = rng.choices(names, k=rng.randint(2, 5))
    chosen += [rng.choice(TWICE)] * 2
    rng.shuffle(chosen)
    stride = rng.choice(("none", "conv", "pool"))
    blocks: list[nn.Module] = []
    for name in chosen:
        if name == "Overwriting":  # what a convolution gives, no backward needs
            blocks.append(nn.Conv2d(WIDTH, WIDTH, 1))
        blocks.append(BLOCKS[name](rng))
    if stride == "conv":
        blocks.insert(rng.randint(0, 2), nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1))
    elif stride == "pool":
        blocks.insert(rng.randint(0, 2), nn.MaxPool2d(3, 2, 1, ceil_mode=rng.random() < 0.5))
    return blocks


class Graph(nn.Module):
    """Blocks one after another, with connections that skip some of them."""

    def __init__(
        self, stem: nn.Module, blocks: list[nn.Module], ends: nn.Module, rng: random.Random
    ) -> None:
        super().__init__()
        self.stem, self.blocks, self.ends = stem, nn.ModuleList(blocks), ends
        self.scale = nn.Parameter(torch.full((WIDTH, 1, 1), 0.8))
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH).view(-1, 1, 1))
        self.skips = {n: rng.randint(0, n) for n in range(1, len(blocks)) if rng.random() < 0.4}
        self.how = {n: rng.choice(("add", "detached", "times", "in place")) for n in self.skips}

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image) * self.scale + self.shift
        seen = [x]
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in self.skips:
                other = seen[self.skips[number]]
                if other.shape != x.shape:
                    other = F.interpolate(other, x.shape[-2:], mode="bilinear")
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
    "in place": _in_place,
}


class Labels(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


class Pixels(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, classes, 1)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        return F.interpolate(self.conv(x), image.shape[-2:], mode="bilinear", align_corners=False)


# --- blocks


def _norm(rng: random.Random) -> nn.Module:
    return rng.choice(
        (
            lambda: nn.BatchNorm2d(WIDTH),
            lambda: nn.BatchNorm2d(WIDTH),
            lambda: nn.BatchNorm2d(WIDTH, momentum=None),
            lambda: nn.GroupNorm(2, WIDTH),
            nn.Identity,
        )
    )()


def _act(rng: random.Random) -> nn.Module:
    return rng.choice((nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.GELU(), nn.SiLU(True)))


class Conv(nn.Sequential):
    def __init__(self, rng: random.Random) -> None:
        kernel = rng.choice((1, 3, 3, 5))
        dilation = rng.choice((1, 1, 2))
        norm = _norm(rng)
        super().__init__(
            nn.Conv2d(
                *(WIDTH, WIDTH, kernel),
                padding=dilation * (kernel // 2),
                dilation=dilation,
                groups=rng.choice((1, 1, 2)),
                bias=isinstance(norm, nn.Identity),
            ),
            norm,
            _act(rng),
        )


class Residual(nn.Module):
    """The block of a ResNet."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.one = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.two = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.act = _norm(rng), _norm(rng), _act(rng)
        self.how = rng.choice(("out", "in place"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.two(self.act(self.norm1(self.one(x)))))
        if self.how == "in place":
            y += x
            return y.relu_()
        return self.act(y + x)


class PreActivation(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.norm, self.act = _norm(rng), nn.ReLU()
        self.one = nn.Conv2d(WIDTH, 2 * WIDTH, 1)
        self.two = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.two(self.one(self.act(self.norm(x))).tanh())


class Squeeze(nn.Module):
    """Channels weighed by what the whole image has of them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = self.two(self.one(x.mean((2, 3))).relu()).sigmoid()
        return x * share[:, :, None, None]


class Dense(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.one = nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.two = nn.Conv2d(WIDTH + 3, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.cat([x, self.one(x).relu()], 1))


class Branches(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.one = nn.Conv2d(WIDTH, WIDTH // 2, (1, 5), padding=(0, 2))
        self.two = nn.Conv2d(WIDTH, WIDTH // 2, 1)
        self.pool = rng.choice(
            (nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.MaxPool2d(3, 1, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(self.pool(x))], 1).tanh()


class Hourglass(nn.Module):
    """Down and up again by a transposed convolution."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.down = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, *rng.choice(((2, 2), (4, 2, 1), (3, 2, 1, 1))))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x).relu())
        return x + y[..., : x.shape[-2], : x.shape[-1]].tanh()


class Stretch(nn.Module):
    """A transposed convolution of a chain, which leaves the size."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = _norm(rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).relu()


class Shared(nn.Module):
    """One convolution, called twice."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.conv(x).tanh()).tanh()


class Detached(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = self.one(x).sigmoid()
        return self.two(x * mask) + 0.1 * x.detach()


class Frozen(nn.Sequential):
    """Does not learn, but its statistics count, as in PyTorch."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.Tanh())
        self.requires_grad_(False)


class Fixed(nn.Sequential):
    """Learns, but for its norm."""

    def __init__(self, rng: random.Random) -> None:
        conv, norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        super().__init__(conv, norm.requires_grad_(False), nn.Tanh())


class Unused(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 3)
        self.register_buffer("factor", torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x) * self.factor).add_(x)


class Overwriting(nn.Module):
    """The first operation writes into its input."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.act, self.norm = nn.ReLU(inplace=True), _norm(rng)
        self.one = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.two = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.norm(self.one(self.act(x))).tanh())


class Views(nn.Module):
    """Writes into a part of a tensor."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv, self.later = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        part = y[:, :2]
        z = self.later(y.tanh())
        part.mul_(0.5)
        return y + z


class Averages(nn.Module):
    """An average and a counter that training updates and evaluation uses."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if not self.training:
            return (y - 0.1 * self.mean[:, None, None]).tanh()
        self.mean.mul_(0.8).add_(y.detach().mean((0, 2, 3)), alpha=0.2)
        self.calls += 1
        return y.tanh()


class AtRest(nn.Module):
    """Keeps its norm in evaluation mode, as detectors do."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).tanh()


class Spectral(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv2d(WIDTH, WIDTH, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).tanh()


class Clamped(nn.Module):
    """A weight that forward writes into."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv, self.gain = nn.Conv2d(WIDTH, WIDTH, 1), nn.Parameter(torch.ones(WIDTH, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.gain.clamp_(0.5, 1.01)
        return (self.conv(x) * self.gain).tanh()


class Hooked(nn.Module):
    """A weight of which some entries are masked, gradients too."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        mask = (torch.arange(self.conv.weight.numel()) % 3 > 0).view_as(self.conv.weight)
        self.conv.weight.register_hook(lambda grad: grad * mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).tanh()


class Checkpointed(nn.Module):
    """Runs again in backward by PyTorch's own means."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)

    def _inside(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._inside, x, use_reentrant=False)


BLOCKS: dict[str, Callable[[random.Random], nn.Module]] = {
    one.__name__: one
    for one in (
        *(Conv, Residual, PreActivation, Squeeze, Dense, Branches, Hourglass, Stretch, Shared),
        *(Detached, Frozen, Fixed, Unused, Overwriting, Views, Averages, AtRest, Spectral),
        *(Clamped, Hooked, Checkpointed),
    )
}
TWICE = ("Residual", "PreActivation", "Dense", "Branches")
