"""The blocks of random networks: what leaves the size and the channels of a map."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 6
"""Channels of all blocks, so that any two can follow one another or be added."""

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
LAZY_CONV = {1: nn.LazyConv1d, 2: nn.LazyConv2d, 3: nn.LazyConv3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
LAZY_NORM = {1: nn.LazyBatchNorm1d, 2: nn.LazyBatchNorm2d, 3: nn.LazyBatchNorm3d}
MAX_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG_POOL = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
"""Layers by the spatial dims of a map."""


def _norm(rng: random.Random, dims: int) -> nn.Module:
    return rng.choice(
        (
            lambda: BATCH_NORM[dims](WIDTH),
            lambda: BATCH_NORM[dims](WIDTH),
            lambda: BATCH_NORM[dims](WIDTH, momentum=None),
            lambda: nn.GroupNorm(2, WIDTH),
            nn.Identity,
        )
    )()


def mean(x: Tensor) -> Tensor:
    """Over the pixels of a map (N, C, *spatial)."""
    return x.mean(tuple(range(2, x.dim())))


def _act(rng: random.Random) -> nn.Module:
    return rng.choice((nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.GELU(), nn.SiLU(True)))


class Conv(nn.Sequential):
    def __init__(self, rng: random.Random, dims: int) -> None:
        kernel = rng.choice((1, 3, 3, 5))
        dilation = rng.choice((1, 1, 2))
        norm = _norm(rng, dims)
        super().__init__(
            CONV[dims](
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

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.one = CONV[dims](WIDTH, WIDTH, 3, padding=1, bias=False)
        self.two = CONV[dims](WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.act = _norm(rng, dims), _norm(rng, dims), _act(rng)
        self.how = rng.choice(("out", "in place"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.two(self.act(self.norm1(self.one(x)))))
        if self.how == "in place":
            y += x
            return y.relu_()
        return self.act(y + x)


class PreActivation(nn.Module):
    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.norm, self.act = _norm(rng, dims), nn.ReLU()
        self.one = CONV[dims](WIDTH, 2 * WIDTH, 1)
        self.two = CONV[dims](2 * WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.two(self.one(self.act(self.norm(x))).tanh())


class Squeeze(nn.Module):
    """Channels weighed by what the whole image has of them."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = self.two(self.one(mean(x)).relu()).sigmoid()
        return x * share[(..., *[None] * (x.dim() - 2))]


class Dense(nn.Module):
    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.one = CONV[dims](WIDTH, 3, 3, padding=1)
        self.two = CONV[dims](WIDTH + 3, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.cat([x, self.one(x).relu()], 1))


class Branches(nn.Module):
    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.one = CONV[dims](
            *(WIDTH, WIDTH // 2, (*(1,) * (dims - 1), 5)), padding=(*(0,) * (dims - 1), 2)
        )
        self.two = CONV[dims](WIDTH, WIDTH // 2, 1)
        self.pool = rng.choice(
            (AVG_POOL[dims](3, 1, 1, count_include_pad=False), MAX_POOL[dims](3, 1, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(self.pool(x))], 1).tanh()


class Hourglass(nn.Module):
    """Down and up again by a transposed convolution."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.down = CONV[dims](WIDTH, WIDTH, 3, stride=2, padding=1)
        self.up = TRANSPOSED[dims](WIDTH, WIDTH, *rng.choice(((2, 2), (4, 2, 1), (3, 2, 1, 1))))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x).relu())
        return x + y[(..., *(slice(n) for n in x.shape[2:]))].tanh()


class Stretch(nn.Module):
    """A transposed convolution of a chain, which leaves the size."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.up = TRANSPOSED[dims](WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = _norm(rng, dims)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).relu()


class Shared(nn.Module):
    """One convolution, called twice."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv = CONV[dims](WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.conv(x).tanh()).tanh()


class Detached(nn.Module):
    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.one, self.two = CONV[dims](WIDTH, WIDTH, 3, padding=1), CONV[dims](WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = self.one(x).sigmoid()
        return self.two(x * mask) + 0.1 * x.detach()


class Frozen(nn.Sequential):
    """Does not learn, but its statistics count, as in PyTorch."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__(CONV[dims](WIDTH, WIDTH, 3, padding=1), BATCH_NORM[dims](WIDTH), nn.Tanh())
        self.requires_grad_(False)


class Fixed(nn.Sequential):
    """Learns, but for its norm."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        conv, norm = CONV[dims](WIDTH, WIDTH, 3, padding=1, bias=False), BATCH_NORM[dims](WIDTH)
        super().__init__(conv, norm.requires_grad_(False), nn.Tanh())


class Unused(nn.Module):
    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv, self.other = CONV[dims](WIDTH, WIDTH, 1), CONV[dims](WIDTH, WIDTH, 3)
        self.register_buffer("factor", torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x) * self.factor).add_(x)


class Overwriting(nn.Module):
    """The first operation writes into its input."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.act, self.norm = nn.ReLU(inplace=True), _norm(rng, dims)
        self.one = CONV[dims](WIDTH, WIDTH, 3, padding=1, bias=False)
        self.two = CONV[dims](WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.norm(self.one(self.act(x))).tanh())


class Views(nn.Module):
    """Writes into a part of a tensor."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv, self.later = CONV[dims](WIDTH, WIDTH, 1), CONV[dims](WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        part = y[:, :2]
        z = self.later(y.tanh())
        part.mul_(0.5)
        return y + z


class Averages(nn.Module):
    """An average and a counter that training updates and evaluation uses."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv = CONV[dims](WIDTH, WIDTH, 3, padding=1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if not self.training:
            return (y - 0.1 * self.mean[(..., *[None] * (x.dim() - 2))]).tanh()
        self.mean.mul_(0.8).add_(y.detach().mean((0, *range(2, x.dim()))), alpha=0.2)
        self.calls += 1
        return y.tanh()


class AtRest(nn.Module):
    """Keeps its norm in evaluation mode, as detectors do."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv, self.norm = CONV[dims](WIDTH, WIDTH, 3, padding=1), BATCH_NORM[dims](WIDTH)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).tanh()


class Spectral(nn.Module):
    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv = parametrizations.spectral_norm(CONV[dims](WIDTH, WIDTH, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).tanh()


REPARAMETRISED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm of old": weight_norm,
    "spectral norm of old": spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", amount=0.3),
}


class Reparametrised(nn.Module):
    """The weight is worked out anew in every forward."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv = REPARAMETRISED[rng.choice(tuple(REPARAMETRISED))](CONV[dims](WIDTH, WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (1, 1) * (x.dim() - 2))).tanh()


class Lazy(nn.Module):
    """Layers that take their shape from the first image."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv = LAZY_CONV[dims](WIDTH, 3, padding=1, bias=False)
        self.norm = LAZY_NORM[dims]()
        self(torch.randn(2, WIDTH, *(3,) * dims))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).tanh()


class ModuleHooks(nn.Module):
    """Hooks of a layer change what it gets, what it gives, and the gradient."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv = CONV[dims](WIDTH, WIDTH, 3, padding=1)
        self.conv.register_forward_pre_hook(lambda _, args: (0.9 * args[0],))
        self.conv.register_forward_hook(lambda _, args, output: output + args[0])
        self.act = nn.Tanh()
        self.act.register_full_backward_hook(lambda _, grads, __: (0.5 * grads[0],))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class Assigned(nn.Module):
    """Writes into channels of tensors of its own."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv = CONV[dims](WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).tanh()
        z = y + 0.0
        z[:, :2] = 0.5 * x[:, :2]
        with torch.no_grad():
            mask = torch.ones_like(x)
            mask[:, 1:4].mul_(0.7)
            mask[:, :3] *= 0.8
        return y + z * mask


class Clamped(nn.Module):
    """A weight that forward writes into."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv, self.gain = (
            CONV[dims](WIDTH, WIDTH, 1),
            nn.Parameter(torch.ones(WIDTH, *(1,) * dims)),
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.gain.clamp_(0.5, 1.01)
        return (self.conv(x) * self.gain).tanh()


class Hooked(nn.Module):
    """A weight of which some entries are masked, gradients too."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv = CONV[dims](WIDTH, WIDTH, 3, padding=1)
        mask = (torch.arange(self.conv.weight.numel()) % 3 > 0).view_as(self.conv.weight)
        self.conv.weight.register_hook(lambda grad: grad * mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).tanh()


class Checkpointed(nn.Module):
    """Runs again in backward by PyTorch's own means."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.conv = CONV[dims](WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = BATCH_NORM[dims](WIDTH)

    def _inside(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._inside, x, use_reentrant=False)


BLOCKS: dict[str, Callable[[random.Random, int], nn.Module]] = {
    one.__name__: one
    for one in (
        *(Conv, Residual, PreActivation, Squeeze, Dense, Branches, Hourglass, Stretch, Shared),
        *(Detached, Frozen, Fixed, Unused, Overwriting, Views, Averages, AtRest, Spectral),
        *(Clamped, Hooked, Checkpointed, Reparametrised, Lazy, ModuleHooks, Assigned),
    )
}
TWICE = ("Residual", "PreActivation", "Dense", "Branches")
