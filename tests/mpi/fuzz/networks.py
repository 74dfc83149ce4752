"""Random networks: chains and graphs of blocks that leave the size and the channels of a map."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 6
"""Channels of all blocks, so that any two can follow one another or be added."""

CONV = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
LAZY_CONV = {2: nn.LazyConv2d, 3: nn.LazyConv3d}
BATCH_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
LAZY_NORM = {2: nn.LazyBatchNorm2d, 3: nn.LazyBatchNorm3d}
MAX_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG_POOL = {2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE = {2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
MODES = {2: "bilinear", 3: "trilinear"}
"""Layers by the spatial dims of a map."""


class Layers:
    """Makes the layers of blocks, with what a seed leaves open.

    Args:
        rng: draws it.
        dims: spatial dims of the maps.
    """

    def __init__(self, rng: random.Random, dims: int) -> None:
        self.choice, self.dims = rng.choice, dims

    def conv(self, kernel: int = 3, to: int = WIDTH, width: int = WIDTH, **how: Any) -> nn.Module:
        """One that leaves the size."""
        padding = how.get("dilation", 1) * (kernel // 2)
        return CONV[self.dims](width, to, kernel, padding=padding, **how)

    def up(self, *how: int, **more: Any) -> nn.Module:
        return TRANSPOSED[self.dims](WIDTH, WIDTH, *how, **more)

    def batch_norm(self, **how: Any) -> nn.Module:
        return BATCH_NORM[self.dims](WIDTH, **how)

    def last(self, size: int, others: int = 1) -> tuple[int, ...]:
        """A size along the last dim."""
        return (*(others,) * (self.dims - 1), size)

    def pool(self) -> nn.Module:
        """One that leaves the size."""
        if self.choice((False, True)):
            return MAX_POOL[self.dims](3, 1, 1)
        # PyTorch takes no volume that is narrower than the kernel, whatever the padding
        return AVG_POOL[self.dims](self.last(3), 1, self.last(1, 0), count_include_pad=False)

    def norm(self) -> nn.Module:
        makes: list[Callable[[], nn.Module]] = [self.batch_norm] * 2
        makes += [lambda: self.batch_norm(momentum=None), lambda: nn.GroupNorm(2, WIDTH)]
        return self.choice([*makes, nn.Identity])()

    def act(self) -> nn.Module:
        acts = nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.GELU(), nn.SiLU(True)
        return self.choice(acts)


def mean(x: Tensor) -> Tensor:
    """Over the pixels of a map (N, C, *spatial)."""
    return x.mean(tuple(range(2, x.dim())))


def as_map(values: Tensor, x: Tensor) -> Tensor:
    """A number for each channel, with the dims of a map."""
    return values[(..., *[None] * (x.dim() - 2))]


def _conv(make: Layers) -> nn.Sequential:
    norm, kernel = make.norm(), make.choice((1, 3, 3, 5))
    how = {"dilation": make.choice((1, 1, 2)), "groups": make.choice((1, 1, 2))}
    conv = make.conv(kernel, bias=isinstance(norm, nn.Identity), **how)
    return nn.Sequential(conv, norm, make.act())


def _residual(block: Any, x: Tensor) -> Tensor:
    """The block of a ResNet."""
    y = block.norm2(block.two(block.act(block.norm1(block.one(x)))))
    if not block.is_in_place:
        return block.act(y + x)
    y += x
    return y.relu_()


def _detached(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = block.one(x).sigmoid()
    return block.two(x * mask) + 0.1 * x.detach()


def _views(block: Any, x: Tensor) -> Tensor:
    """Writes into a part of a tensor."""
    y = block.conv(x)
    part = y[:, :2]
    z = block.later(y.tanh())
    part.mul_(0.5)
    return y + z


def _averages(block: Any, x: Tensor) -> Tensor:
    """Training updates an average and a counter, and evaluation uses them."""
    y = block.conv(x)
    if not block.training:
        return (y - 0.1 * as_map(block.mean, x)).tanh()
    block.mean.mul_(0.8).add_(y.detach().mean((0, *range(2, x.dim()))), alpha=0.2)
    block.calls += 1
    return y.tanh()


class AtRest(nn.Sequential):
    """Layers that stay in evaluation mode, as detectors keep their norms."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


def _assigned(block: Any, x: Tensor) -> Tensor:
    """Writes into channels of tensors of its own."""
    y = block.conv(x).tanh()
    z = y + 0.0
    z[:, :2] = 0.5 * x[:, :2]
    with torch.no_grad():
        mask = torch.ones_like(x)
        mask[:, 1:4].mul_(0.7)
        mask[:, :3] *= 0.8
    return y + z * mask


def _clamped(block: Any, x: Tensor) -> Tensor:
    """Writes into a weight."""
    with torch.no_grad():
        block.gain.clamp_(0.5, 1.01)
    return (block.conv(x) * as_map(block.gain, x)).tanh()


def _hooked(make: Layers) -> nn.Module:
    """A weight of which some entries are masked, gradients too."""
    conv = make.conv()
    mask = (torch.arange(conv.weight.numel()) % 3 > 0).view_as(conv.weight)
    conv.weight.register_hook(lambda grad: grad * mask)
    return conv


def _with_hooks(make: Layers) -> dict[str, nn.Module]:
    """Hooks of a layer change what it gets, what it gives, and the gradient."""
    conv, act = make.conv(), nn.Tanh()
    conv.register_forward_pre_hook(lambda _, args: (0.9 * args[0],))
    conv.register_forward_hook(lambda _, args, output: output + args[0])
    act.register_full_backward_hook(lambda _, grads, __: (0.5 * grads[0],))
    return {"conv": conv, "act": act}


def _reparametrised(make: Layers) -> nn.Module:
    """The weight is worked out anew in every forward."""
    ways: tuple[Callable[[nn.Module], nn.Module], ...] = (
        *(parametrizations.weight_norm, weight_norm, spectral_norm, parametrizations.orthogonal),
        lambda layer: prune.random_unstructured(layer, "weight", amount=0.3),
    )
    return make.choice(ways)(make.conv())


def _lazy(make: Layers) -> dict[str, nn.Module]:
    """Layers that take their shape from the first image."""
    conv = LAZY_CONV[make.dims](WIDTH, 3, padding=1, bias=False)
    norm = LAZY_NORM[make.dims]()
    norm(conv(torch.randn(2, WIDTH, *(3,) * make.dims)))
    return {"conv": conv, "norm": norm}


Made = Mapping[str, Any] | nn.Module
RECIPES: dict[str, tuple[Callable[[Layers], Made], Callable[[Any, Tensor], Tensor] | None]] = {
    # what a block has: modules, parameters, buffers and others by name; what it does with a map
    "Conv": (_conv, None),
    "Residual": (
        lambda make: {
            **{"one": make.conv(bias=False), "two": make.conv(bias=False), "act": make.act()},
            **{"norm1": make.norm(), "norm2": make.norm(), "is_in_place": make.choice((0, 1))},
        },
        _residual,
    ),
    "PreActivation": (
        lambda make: {
            **{"norm": make.norm(), "act": nn.ReLU()},
            **{"one": make.conv(1, to=2 * WIDTH), "two": make.conv(width=2 * WIDTH)},
        },
        lambda own, x: x + 0.5 * own.two(own.one(own.act(own.norm(x))).tanh()),
    ),
    "Squeeze": (  # channels weighed by what the whole image has of them
        lambda make: {"one": nn.Linear(WIDTH, 3), "two": nn.Linear(3, WIDTH)},
        lambda own, x: x * as_map(own.two(own.one(mean(x)).relu()).sigmoid(), x),
    ),
    "Dense": (
        lambda make: {"one": make.conv(to=3), "two": make.conv(1, width=WIDTH + 3)},
        lambda own, x: own.two(torch.cat([x, own.one(x).relu()], 1)),
    ),
    "Branches": (
        lambda make: {
            "one": CONV[make.dims](WIDTH, WIDTH // 2, make.last(5), padding=make.last(2, 0)),
            "two": make.conv(1, to=WIDTH // 2),
            "pool": make.pool(),
        },
        lambda own, x: torch.cat([own.one(x), own.two(own.pool(x))], 1).tanh(),
    ),
    "Hourglass": (  # down and up again by a transposed convolution
        lambda make: {
            "down": make.conv(stride=2),
            "up": make.up(*make.choice(((2, 2), (4, 2, 1), (3, 2, 1, 1)))),
        },
        lambda own, x: (
            x + own.up(own.down(x).relu())[(..., *(slice(n) for n in x.shape[2:]))].tanh()
        ),
    ),
    "Stretch": (  # one that leaves the size
        lambda make: {"up": make.up(3, padding=1, bias=False), "norm": make.norm()},
        lambda own, x: own.norm(own.up(x)).relu(),
    ),
    "Shared": (
        lambda make: {"conv": make.conv()},
        lambda own, x: x + own.conv(own.conv(x).tanh()).tanh(),
    ),
    "Detached": (lambda make: {"one": make.conv(), "two": make.conv(1)}, _detached),
    "Frozen": (  # does not learn, but its statistics count, as in PyTorch
        lambda make: nn.Sequential(make.conv(), make.batch_norm(), nn.Tanh()).requires_grad_(False),
        None,
    ),
    "Fixed": (  # learns, but for its norm
        lambda make: nn.Sequential(
            make.conv(bias=False), make.batch_norm().requires_grad_(False), nn.Tanh()
        ),
        None,
    ),
    "Unused": (
        lambda make: {"conv": make.conv(1), "other": make.conv(), "factor": torch.tensor(0.7)},
        lambda own, x: (own.conv(x) * own.factor).add_(x),
    ),
    "Overwriting": (  # the first operation writes into its input
        lambda make: {
            **{"act": nn.ReLU(inplace=True), "norm": make.norm()},
            **{"one": make.conv(bias=False), "two": make.conv(1)},
        },
        lambda own, x: x + own.two(own.norm(own.one(own.act(x))).tanh()),
    ),
    "Views": (lambda make: {"conv": make.conv(1), "later": make.conv(1)}, _views),
    "Averages": (
        lambda make: {"conv": make.conv(), "mean": torch.zeros(WIDTH), "calls": torch.zeros(())},
        _averages,
    ),
    "AtRest": (
        lambda make: {"conv": make.conv(), "norm": AtRest(make.batch_norm())},
        lambda own, x: own.norm(own.conv(x)).tanh(),
    ),
    "Spectral": (
        lambda make: {"conv": parametrizations.spectral_norm(make.conv())},
        lambda own, x: own.conv(x).tanh(),
    ),
    "Clamped": (
        lambda make: {"conv": make.conv(1), "gain": nn.Parameter(torch.ones(WIDTH))},
        _clamped,
    ),
    "Hooked": (lambda make: {"conv": _hooked(make)}, lambda own, x: own.conv(x).tanh()),
    "Checkpointed": (  # runs again in backward by PyTorch's own means
        lambda make: {"all": nn.Sequential(make.conv(bias=False), make.batch_norm(), nn.Tanh())},
        lambda own, x: x + checkpoint(own.all, x, use_reentrant=False),
    ),
    "Reparametrised": (
        lambda make: {"conv": _reparametrised(make)},
        lambda own, x: own.conv(x).tanh(),
    ),
    "Lazy": (_lazy, lambda own, x: x + own.norm(own.conv(x)).tanh()),
    "ModuleHooks": (_with_hooks, lambda own, x: own.act(own.conv(x))),
    "Assigned": (lambda make: {"conv": make.conv(1)}, _assigned),
}
TWICE = ("Residual", "PreActivation", "Dense", "Branches")


class Block(nn.Module):
    """A block of a recipe; each recipe has a class of its own, by which layers are recomputed."""

    def __init__(self, make: Layers) -> None:
        super().__init__()
        made, self._do = RECIPES[type(self).__name__][0](make), RECIPES[type(self).__name__][1]
        for name, one in ({"all": made} if isinstance(made, nn.Module) else made).items():
            if isinstance(one, Tensor) and not isinstance(one, nn.Parameter):
                self.register_buffer(name, one)
            else:
                setattr(self, name, one)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(x) if self._do is None else self._do(self, x)


BLOCKS: dict[str, type[Block]] = {name: type(name, (Block,), {}) for name in RECIPES}


def network(
    num_classes: int,
    in_channels: int,
    seed: int,
    kind: str,
    head: str,
    names: Sequence[str],
    stride: str = "none",
    joins: Sequence[str] = (),
    dims: int = 2,
) -> nn.Module:
    """A network of blocks.

    Args:
        seed: of weights, and of what blocks leave open.
        kind: "chain", an `nn.Sequential`, or "graph", with a forward of its own.
        head: "labels", or "masks" for an output as large as the image.
        names: the blocks, keys of `BLOCKS`.
        stride: what halves the map after the first block: "none", "conv" or "pool".
        joins: of graphs, the connections that may skip blocks, keys of `JOINS`.
        dims: spatial dims of the images.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    make = Layers(rng, dims)
    stem = nn.Sequential(make.conv(width=in_channels), nn.ReLU(inplace=True))
    blocks: list[nn.Module] = []
    for name in names:
        if name == "Overwriting":  # what a convolution gives, no backward needs
            blocks.append(make.conv(1))
        blocks.append(BLOCKS[name](make))
    if stride == "conv":
        blocks.insert(1, make.conv(stride=2))
    elif stride == "pool":
        blocks.insert(1, MAX_POOL[dims](3, 2, 1, ceil_mode=rng.random() < 0.5))
    last = [make.conv(), nn.Tanh()]
    ends = Pixels(num_classes, dims) if head == "masks" else Labels(num_classes)
    if kind == "chain" and head == "labels":
        return nn.Sequential(*stem, *blocks, *last, ADAPTIVE[dims](1), nn.Flatten(), ends.fc)
    return Graph(stem, [*blocks, nn.Sequential(*last)], ends, joins, rng)


class Graph(nn.Module):
    """Blocks one after another, with connections that skip some of them."""

    def __init__(
        self,
        stem: nn.Module,
        blocks: list[nn.Module],
        ends: nn.Module,
        joins: Sequence[str],
        rng: random.Random,
    ) -> None:
        super().__init__()
        self.stem, self.blocks, self.ends = stem, nn.ModuleList(blocks), ends
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.8))
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH))
        starts = {n: rng.randint(0, n) for n in range(1, len(blocks)) if rng.random() < 0.4}
        self.skips = {n: (start, rng.choice(joins)) for n, start in starts.items() if joins}

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x = x * as_map(self.scale, x) + as_map(self.shift, x)
        seen = [x]
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in self.skips:
                start, join = self.skips[number]
                other = seen[start]
                if other.shape != x.shape:
                    other = F.interpolate(other, x.shape[2:], mode=MODES[x.dim() - 2])
                x = JOINS[join](x, other)
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
