"""Pre-activation residual networks for small images, as chains, such as ResNet-110 v2.

He, Zhang, Ren, Sun: "Identity Mappings in Deep Residual Networks", ECCV 2016
(https://arxiv.org/abs/1603.05027), in the form of Keras' CIFAR example, which is used by papers on
training with large images:

- Jain et al.: "GEMS: GPU-Enabled Memory-Aware Model-Parallelism System for Distributed DNN
  Training", SC 2020;
- Jain et al.: "Hy-Fi: Hybrid Five-Dimensional Parallel DNN Training on High-Performance GPU
  Clusters", ISC 2022.

Convolutions have no bias, as each is followed by a BatchNorm, at the latest after the sum.

    depth = 9 n + 2: a stem, three stages of n blocks of three convolutions, a linear layer

    stage   channels within a block    channels out    stride of its first block
    1       16                         64              1
    2       64                         128             2
    3       128                        256             2
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


class PreActivationBottleneck(nn.Module):
    """Residual block of BatchNorm, ReLU and convolution, three times (1x1, 3x3, 1x1).

    Args:
        in_channels: channels of the input.
        width: channels within the block.
        out_channels: channels of the output.
        stride: stride of the first convolution and of the shortcut.
        activate: whether BatchNorm and ReLU precede the first convolution. The very first block
            omits them, as the stem ends with them.
        project: whether the shortcut is a 1x1 convolution (the first block of every stage).
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        out_channels: int,
        stride: int = 1,
        *,
        activate: bool = True,
        project: bool = False,
    ) -> None:
        super().__init__()
        body = nn.Sequential()
        if activate:
            body.add_module("bn1", nn.BatchNorm2d(in_channels))
            body.add_module("relu1", nn.ReLU(inplace=True))
        body.add_module("conv1", nn.Conv2d(in_channels, width, 1, stride, bias=False))
        body.add_module("bn2", nn.BatchNorm2d(width))
        body.add_module("relu2", nn.ReLU(inplace=True))
        body.add_module("conv2", nn.Conv2d(width, width, 3, padding=1, bias=False))
        body.add_module("bn3", nn.BatchNorm2d(width))
        body.add_module("relu3", nn.ReLU(inplace=True))
        body.add_module("conv3", nn.Conv2d(width, out_channels, 1, bias=False))
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if project:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.body(x)  # type: ignore[no-any-return]


class ResNetV2(nn.Sequential):
    """A chain: conv1, bn1, relu1, layer1 ... layer3, bn2, relu2, avgpool, flatten, fc.

    A slice of it (``network[:4]``) is again a chain, with the same names.
    """


def resnet110_v2(num_classes: int = 10, in_channels: int = 3, width: int = 16) -> ResNetV2:
    """ResNet-110 v2 (He et al., 2016), the network of the GEMS papers.

    ``forward`` takes (N, in_channels, H, W) and returns (N, num_classes).

    Args:
        num_classes: outputs of the last layer.
        in_channels: channels of the image.
        width: channels of the stem.
    """
    return resnet_v2(110, num_classes, in_channels, width)


def resnet_v2(depth: int, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> ResNetV2:
    """A pre-activation residual network with ``depth`` layers, for images of any size.

    Args:
        depth: layers with weights, without shortcuts: 9 n + 2 for n blocks per stage.
        num_classes: outputs of the last layer.
        in_channels: channels of the image.
        width: channels of the stem.

    Raises:
        ValueError: the depth is not 9 n + 2.
    """
    blocks, rest = divmod(depth - 2, 9)
    if rest or blocks < 1:
        raise ValueError(
            f"a ResNet v2 has 9 n + 2 layers, n blocks in each of its three stages, "
            f"but depth is {depth}: use {9 * max(blocks, 1) + 2} or {9 * max(blocks, 1) + 11}"
        )
    children: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu1=nn.ReLU(),
    )
    channels = width
    for stage, out_channels in enumerate((4 * width, 8 * width, 16 * width)):
        children[f"layer{stage + 1}"] = _stage(stage, blocks, channels, out_channels)
        channels = out_channels
    children["bn2"] = nn.BatchNorm2d(channels)
    children["relu2"] = nn.ReLU()
    children["avgpool"] = nn.AdaptiveAvgPool2d(1)
    children["flatten"] = nn.Flatten()
    children["fc"] = nn.Linear(channels, num_classes)
    network = ResNetV2(children)
    network.apply(_initialise)
    return network


def _stage(stage: int, blocks: int, in_channels: int, out_channels: int) -> nn.Sequential:
    first = PreActivationBottleneck(
        in_channels,
        in_channels,
        out_channels,
        stride=1 if stage == 0 else 2,
        activate=stage > 0,
        project=True,
    )
    others = (
        PreActivationBottleneck(out_channels, in_channels, out_channels) for _ in range(blocks - 1)
    )
    return nn.Sequential(first, *others)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
