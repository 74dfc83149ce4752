"""A small encoder of tiles, whose features of a tile depend on that tile alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from spatialdl.models.bags import check_sizes

_GROUPS = 4


def tile_encoder(
    in_channels: int = 3, num_classes: int = 64, widths: Sequence[int] = (16, 32)
) -> nn.Sequential:
    """Tiles (n, C, h, w) to features (n, D): convolutions, then the largest value of each map.

    GroupNorm (Wu and He, "Group Normalization", ECCV 2018, https://arxiv.org/abs/1803.08494) takes
    statistics of one tile at a time, so that it trains in slices as it does on all tiles at once.
    The largest value, unlike the mean, finds a small thing in a tile.

    Args:
        in_channels: channels of a tile.
        num_classes: D, a multiple of 4; encoders are networks whose outputs are features.
        widths: channels of the layers before the last, multiples of 4; each halves the sides.

    Raises:
        ValueError: a number is out of range.
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
