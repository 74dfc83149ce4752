"""Networks whose forward changes their buffers, or mixes the samples of a slice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """Layers that run again in backward, in each of which BatchNorm counts once more."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


class Shared(nn.Module):
    """Calls its layer twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def chain(*layers: nn.Module, channels: int = 6) -> nn.Sequential:
    """Layers on maps of 6 channels, between a convolution and a linear head."""
    stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))
    return nn.Sequential(stem, nn.BatchNorm2d(6), *layers, *head)


def conv() -> nn.Module:
    return nn.Conv2d(6, 6, 3, padding=1)


def checkpointed() -> nn.Module:
    inner = Checkpointed(conv(), nn.BatchNorm2d(6, momentum=None), nn.Tanh(), conv())
    return chain(
        Checkpointed(conv(), nn.BatchNorm2d(6)),
        Checkpointed(nn.Tanh(), Shared(nn.BatchNorm2d(6)), conv()),
        Checkpointed(inner, nn.BatchNorm2d(6, affine=False)),
        nn.Tanh(),
        conv(),
    )


class Block(nn.Module):
    """Of which a stage gathers the weights apart from the others, where it shards its state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.conv1(x).tanh())


def hooked() -> nn.Module:
    """Some of its gradients are masked or scaled by hooks, some of its weights are pruned."""
    network = chain(nn.Sequential(Block(), Block()), conv())
    for module in list(network.modules()):
        if isinstance(module, nn.Conv2d):
            mask = (torch.arange(module.weight.numel()) % 3 > 0).view_as(module.weight)
            module.weight.register_hook(lambda grad, mask=mask: grad * mask.to(grad.device))
            module.bias.register_hook(lambda grad: 3 * grad)
    prune.random_unstructured(network[2][0].conv1, "weight", 0.3)
    prune.l1_unstructured(network[-1], "weight", 0.3)
    for layer in (network[2][0].conv1, network[-1]):
        layer.weight = layer.weight.detach()
    network[-1].weight_orig.register_hook(lambda grad: grad.flip(0))
    return network


class Averages(nn.Module):
    """Averages that move along and counters, in the ways in which one writes them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("in_place", "assigned", "lerped", "data", "last", "decayed"):
            self.register_buffer(name, torch.linspace(0, 1, 6))
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("constant", torch.linspace(1, 2, 6).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().mean((0, 2, 3))
            with torch.no_grad():
                self.in_place.mul_(0.9).add_(mean, alpha=0.1)
                self.assigned = 0.7 * self.assigned + (1 - 0.7) * mean
                self.lerped.lerp_(mean, 0.25)
                self.data.data = self.data.data * 0.5 + mean.square()
                self.last.copy_(mean)
                self.decayed *= 0.8
            self.calls += 1
            self.started.fill_(True)
        return x * self.constant


class Always(nn.Sequential):
    """Layers that stay in training mode."""

    def train(self, mode: bool = True) -> nn.Sequential:
        return super().train()


class Moving(nn.Module):
    """A running mean that evaluation takes off each channel, moved along in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.linspace(0, 1, 6).view(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        mean = x.mean((0, 2, 3)).view(6, 1, 1)
        with torch.no_grad():
            if self.how == "in place":
                self.mean.mul_(0.9).add_(mean, alpha=0.1)
            elif self.how == "augmented":
                self.mean *= 0.9
                self.mean += 0.1 * mean
            else:
                self.mean = 0.9 * self.mean + 0.1 * mean
        return x - mean


class OwnNorm(nn.BatchNorm2d):
    """BatchNorm and what follows it in one layer, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        y = F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum)
        return y.tanh()


class TimmNorm(nn.BatchNorm2d):
    """As timm's own, of which it is known that its statistics are BatchNorm's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


TimmNorm.forward.__module__ = "timm.layers.norm_act"


class LouderNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Normalised(nn.Module):
    """BatchNorm as a function, with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training, momentum=0.3)


class Centred(nn.Module):
    """Statistics over the samples of a slice."""

    def forward(self, x: Tensor) -> Tensor:
        spread = x.std(0).mean() if len(x) > 1 else 0
        return x - x.mean(0) + spread


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)


def of_samples(*more: nn.Module) -> nn.Module:
    """Its evaluation is by statistics of the samples given, too, which some layers keep."""
    statistics = nn.BatchNorm2d(6, track_running_stats=False)
    return chain(statistics, conv(), Always(nn.BatchNorm2d(6)), conv(), Normalised(), *more, conv())


class CentredInEvaluation(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else super().forward(x)


def averages() -> nn.Module:
    norms = OwnNorm(6), conv(), LouderNorm(6, momentum=0.2), Normalised(), conv()
    instance = nn.InstanceNorm2d(6, track_running_stats=True)
    return chain(Averages(), *norms, Shared(Averages()), instance, conv())


def moving() -> nn.Module:
    return chain(Moving("in place"), conv(), Moving("augmented"), conv(), Moving("assigned"))


def spectral() -> nn.Module:
    """Both kinds of spectral norm."""
    convolutions = [conv() for _ in range(4)]
    for layer in convolutions[:3]:
        parametrizations.spectral_norm(layer)
    blocks = nn.Sequential(Block(), Block())
    parametrizations.spectral_norm(blocks[0].conv1)
    parametrizations.spectral_norm(blocks[1].conv2, n_power_iterations=2)
    spectral_norm(convolutions[3])
    convolutions[3].weight = convolutions[3].weight.detach()
    first, *others = convolutions
    return chain(first, blocks, *others)


SAMPLE_NETWORKS = {
    "always_moves": lambda: chain(Always(Averages(), conv(), nn.BatchNorm2d(6))),
    "averages": averages,
    "centred": lambda: chain(Centred(), conv(), Centred()),
    "checkpointed": checkpointed,
    "hooked": hooked,
    "moving": moving,
    "of_samples": of_samples,
    "of_samples_at_random": lambda: of_samples(Drops()),
    "norms": lambda: chain(OwnNorm(6), conv(), LouderNorm(6), Normalised(), conv()),
    "spectral": spectral,
    "statistics": lambda: chain(
        Shared(nn.BatchNorm2d(6, momentum=None)), conv(), TimmNorm(6, momentum=0.9, affine=False)
    ),
}
