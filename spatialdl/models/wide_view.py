"""A small network with a receptive field of 1,279 pixels before global pooling.

Residual networks for ImageNet see a few hundred pixels before they average over the image, which
loses positions. Here maps become small early, and convolutions at a stride of 128 pixels relate
places 1,000 pixels apart.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

_STRIDES = (2, 2, 2, 2, 1, 1, 1, 1)


def wide_view(num_classes: int = 2, in_channels: int = 3, width: int = 8) -> nn.Sequential:
    """A chain of convolutions: 63,000 parameters at width 8.

    Args:
        num_classes: outputs of the last layer.
        in_channels: channels of the image.
        width: channels of the first layer; later ones have 2 and 4 times as many.
    """
    children: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(in_channels, width, 7, stride=4, padding=3, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    channels = width
    for number, stride in enumerate(_STRIDES, 1):
        out_channels = width * (2 if number == 1 else 4)
        children[f"block{number}"] = _block(channels, out_channels, stride)
        channels = out_channels
    children["avgpool"] = nn.AdaptiveAvgPool2d(1)
    children["flatten"] = nn.Flatten()
    children["fc"] = nn.Linear(channels, num_classes)
    return nn.Sequential(children)


def _block(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
