"""Small networks that between them do everything that a layout must not change."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.models import amoebanet_d, resnet18, resnet50, resnet110_v2, unet, unet3d, vit
from spatialdl.spatial.random import scope
from tests.mpi.sample_networks import SAMPLE_NETWORKS
from tests.mpi.spatial.channels.networks import Layer, Swin
from tests.mpi.stateful_networks import STATEFUL


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


class OddSignalNet(nn.Sequential):
    """`OddNet` for signals (N, 3, L); its padding travels around the signal once."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(3, 8, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool1d(3, 2, 1, ceil_mode=True),
            nn.Conv1d(8, 12, 4, padding=2, groups=4, padding_mode="circular"),
            nn.Sigmoid(),
            nn.Upsample(scale_factor=1.5, mode="linear"),
            nn.ConvTranspose1d(12, 12, 4, stride=3, padding=1, output_padding=1),
            nn.InstanceNorm1d(12, affine=True),
            nn.Conv1d(12, 12, 3, padding=2, dilation=2),
            nn.BatchNorm1d(12, momentum=None),
            nn.Tanh(),
            nn.AvgPool1d(3, 2, 1, count_include_pad=False),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        )


class OddVolumeNet(nn.Sequential):
    """`OddNet` for volumes (N, 3, D, H, W)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(3, 8, (3, 5, 3), stride=(1, 2, 2), padding=(1, 2, 1), bias=False),
            nn.BatchNorm3d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool3d(3, 2, 1, ceil_mode=True),
            nn.Conv3d(8, 12, (4, 2, 3), padding=(2, 1, 1), groups=4, padding_mode="circular"),
            nn.Sigmoid(),
            nn.ConvTranspose3d(12, 8, (2, 3, 2), stride=2, padding=(0, 1, 0)),
            nn.GroupNorm(2, 8),
            nn.Conv3d(8, 12, 3, padding=2, dilation=2),
            nn.BatchNorm3d(12, momentum=None),
            nn.Tanh(),
            nn.AvgPool3d(3, 2, 1, count_include_pad=False),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        )


class RandomVolumeNet(nn.Sequential):
    """Drops voxels, channels and features of volumes (N, 3, D, H, W)."""

    def __init__(self) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv3d(3, 8, 3, stride=2, padding=1),
                relu=nn.ReLU(inplace=True),
                channels=nn.Dropout3d(0.3),
                conv2=nn.Conv3d(8, 8, 3, padding=1),
                voxels=nn.Dropout(0.3, inplace=True),
                norm=nn.BatchNorm3d(8),
                pool=nn.AdaptiveAvgPool3d(1),
                flatten=nn.Flatten(),
                features=nn.Dropout(0.2),
                linear=nn.Linear(8, 5),
            )
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
    """The head flattens a map, of images of 50 x 34."""
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


class Mixing(nn.Module):
    """A layer of a transformer, and a convolution of maps whose channels are the last dim."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).reshape(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(count, tokens, width))


class Transformer(nn.Module):
    """Channels-last maps, then tokens with class token, registers and positions."""

    def __init__(self, width: int = 12, size: tuple[int, int] = (9, 7)) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 5, 4, 2)
        self.last = nn.LayerNorm(width)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.registers = nn.Parameter(torch.randn(1, 2, width))
        self.positions = nn.Parameter(torch.randn(1, size[0] * size[1] + 1, width))
        self.first, self.second = Mixing(width, 3), Mixing(width, 2)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(2 * width, 5)
        self.scoped = False  # see `Plain`

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.patches(x).permute(0, 2, 3, 1)).flatten(1, 2)
        token, registers = (one.expand(len(x), -1, -1) for one in (self.token, self.registers))
        x = torch.cat([torch.cat([token, x], 1) + self.positions, registers], 1)
        x = self.first(x)
        with scope("drop") if self.scoped else nullcontext():
            x = self.drop(x)
        x = self.second(x)
        return self.head(torch.cat([x[:, 0], x[:, 1:-2].mean(1)], 1))


small_vit = partial(vit, num_classes=5, patch=4, width=12, depth=2, heads=3, mlp_ratio=2)


def swin() -> nn.Module:
    """Without random numbers, which one process would draw in another order."""
    model = Swin(fused=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, Layer):
            module.drop_path = 0.0
    return model


NETWORKS = {
    "swin": swin,
    "transformer": Transformer,
    "vit": partial(small_vit, registers=2, dropout=0.2),
    "vit_plain": partial(small_vit, depth=3),
    "vit_mean": partial(small_vit, pool="mean"),
    "vit_mean_registers": partial(small_vit, pool="mean", registers=3, dropout=0.1),
    "vit_signal": partial(small_vit, dims=1, registers=1),
    "vit_volume": partial(small_vit, dims=3, pool="mean"),
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
    "odd_signal": OddSignalNet,
    "odd_volume": OddVolumeNet,
    "random_volume": RandomVolumeNet,
    "unet3d": lambda: unet3d(num_classes=5, in_channels=3, width=4, depth=2),
    **STATEFUL,
    **SAMPLE_NETWORKS,
}
