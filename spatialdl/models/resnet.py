"""Residual networks for ImageNet, as chains.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016
(https://arxiv.org/abs/1512.03385). The stride of a bottleneck is in its 3x3 convolution
("version 1.5").

The names in the state dict are torchvision's, so its weights load. The network is a chain of named
children without a custom ``forward``, so it can be cut before any child or block. Therefore the
activation of the stem is not in place: after a cut, its input is a leaf that requires grad.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(y + shortcut)  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """Residual block of a 3x3 convolution between two 1x1 convolutions."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(y + shortcut)  # type: ignore[no-any-return]


class ResNet(nn.Sequential):
    """A chain: conv1, bn1, relu, maxpool, layer1 ... layer4, avgpool, flatten, fc.

    A slice of it (``network[:5]``) is again a chain, with the same names.
    """


def resnet18(num_classes: int = 1000, in_channels: int = 3, width: int = 64) -> ResNet:
    """ResNet-18 (He et al., 2016): 11.7 million parameters at 1000 classes.

    ``forward`` takes (N, in_channels, H, W) and returns (N, num_classes).

    Args:
        num_classes: outputs of the last layer.
        in_channels: channels of the image.
        width: channels of the first stage; the later ones have 2, 4 and 8 times as many.
    """
    return _resnet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels, width)


def resnet50(num_classes: int = 1000, in_channels: int = 3, width: int = 64) -> ResNet:
    """ResNet-50 (He et al., 2016): 25.6 million parameters at 1000 classes.

    ``forward`` takes (N, in_channels, H, W) and returns (N, num_classes).

    Args:
        num_classes: outputs of the last layer.
        in_channels: channels of the image.
        width: channels of the first stage's 3x3 convolutions; its outputs have 4 times as many.
    """
    return _resnet(Bottleneck, (3, 4, 6, 3), num_classes, in_channels, width)


def _resnet(
    block: type[BasicBlock] | type[Bottleneck],
    blocks: Sequence[int],
    num_classes: int,
    in_channels: int,
    width: int,
) -> ResNet:
    children: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    channels = width
    for stage, count in enumerate(blocks):
        layer = nn.Sequential()
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            layer.append(block(channels, width * 2**stage, stride))
            channels = width * 2**stage * block.expansion
        children[f"layer{stage + 1}"] = layer
    children["avgpool"] = nn.AdaptiveAvgPool2d(1)
    children["flatten"] = nn.Flatten()
    children["fc"] = nn.Linear(channels, num_classes)
    network = ResNet(children)
    network.apply(_initialise)
    return network


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The shortcut's convolution, if the block changes the size or the channels."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
