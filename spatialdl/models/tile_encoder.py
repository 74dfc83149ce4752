"""A small encoder of tiles, without interaction between tiles of a batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from spatialdl.models.bags import check_sizes

_GROUPS = 4


def tile_encoder(
    in_channels: int = 3, num_classes: int = 64, widths: Sequence[int] = (16, 32)
) -> nn.Sequential:
    """Encoder of tiles (n, C, h, w) to features (n, D): convolutions, then global max pooling.

    GroupNorm (Wu and He, "Group Normalization", ECCV 2018, https://arxiv.org/abs/1803.08494) uses
    statistics of single tiles, so training on slices of a bag equals training on all tiles at once.
    The maximum, unlike the mean, detects a small object in a tile.

    Args:
        in_channels: channels of a tile.
        num_classes: D, a multiple of 4; named as in other networks.
        widths: channels of the layers before the last, multiples of 4; each has stride 2.

    Raises:
        ValueError: a value is out of range.
    """
    check_sizes(in_channels=in_channels, num_classes=num_classes)
    wrong = [n for n in (*widths, num_classes) if n < 1 or n % _GROUPS]
    if wrong:
        raise ValueError(
            f"widths={list(widths)} and num_classes={num_classes} must be multiples of {_GROUPS}, "
            f"the groups of GroupNorm, got {wrong[0]}"
        )
    children: OrderedDict[str, nn.Module] = OrderedDict()
    channels = in_channels
    for number, width in enumerate((*widths, num_classes), 1):
        stride = 2 if number <= len(widths) else 1
        children[f"conv{number}"] = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        children[f"norm{number}"] = nn.GroupNorm(_GROUPS, width)
        children[f"relu{number}"] = nn.ReLU()
        channels = width
    children["maxpool"] = nn.AdaptiveMaxPool2d(1)
    children["flatten"] = nn.Flatten()
    return nn.Sequential(children)
