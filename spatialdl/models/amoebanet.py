"""AmoebaNet-D, a network found by evolutionary search, as a chain of cells.

Real, Aggarwal, Huang, Le: "Regularized Evolution for Image Classifier Architecture Search", AAAI
2019 (https://arxiv.org/abs/1802.01548), as in TensorFlow's reference code, which is also used by
GPipe (Huang et al. 2019, table 1; the numbers of parameters are the same), torchgpipe and MPI4DL.
In the paper's figure the normal cell concatenates other states.

Each cell takes the outputs of the two previous cells, and returns a tuple: its output and that of
the previous cell. Images may have any size: pooling of odd sizes rounds up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
"""The output of a cell, and that of the cell before it."""


def _conv(
    in_channels: int, out_channels: int, rows: int, cols: int, stride: tuple[int, int] = (1, 1)
) -> list[nn.Module]:
    """ReLU, convolution, BatchNorm; the ReLU is not in place, as its input is used elsewhere."""
    padding = (rows // 2, cols // 2)
    conv = nn.Conv2d(in_channels, out_channels, (rows, cols), stride, padding, bias=False)
    return [nn.ReLU(), conv, nn.BatchNorm2d(out_channels)]


class FactorizedReduce(nn.Module):
    """Halve the resolution by two convolutions, of the even and of the odd pixels."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        half = out_channels // 2
        self.even = nn.Conv2d(in_channels, half, 1, 2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels - half, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        y: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))
        return y


def _identity(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduce(channels, channels)


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(*_conv(channels, channels, 1, 1, stride=(stride, stride)))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    inside = channels // 4
    return nn.Sequential(
        *_conv(channels, inside, 1, 1),
        *_conv(inside, inside, 3, 3, stride=(stride, stride)),
        *_conv(inside, channels, 1, 1),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    inside = channels // 4
    return nn.Sequential(
        *_conv(channels, inside, 1, 1),
        *_conv(inside, inside, 1, 7, stride=(1, stride)),
        *_conv(inside, inside, 7, 1, stride=(stride, 1)),
        *_conv(inside, channels, 1, 1),
    )


def _max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def _max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def _avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


Operation = Callable[[int, int], nn.Module]
"""Builds a module for a number of channels and a stride."""

# each line: two operations with the indices of their input states; their sum is the next state
NORMAL: list[tuple[int, Operation]] = [
    *((1, _conv_1x1), (1, _max_pool_3x3)),
    *((1, _identity), (0, _conv_1x7_7x1)),
    *((0, _conv_1x1), (0, _conv_1x7_7x1)),
    *((2, _max_pool_3x3), (2, _identity)),
    *((1, _avg_pool_3x3), (5, _conv_1x1)),
]
REDUCTION: list[tuple[int, Operation]] = [
    *((0, _max_pool_2x2), (0, _max_pool_3x3)),
    *((2, _identity), (1, _conv_3x3)),
    *((2, _conv_1x7_7x1), (2, _max_pool_3x3)),
    *((3, _identity), (1, _max_pool_2x2)),
    *((2, _avg_pool_3x3), (3, _conv_1x1)),
]
NORMAL_GATHERS, REDUCTION_GATHERS = (0, 3, 4, 6), (4, 5, 6)


class Cell(nn.Module):
    """Five sums of two operations each, on the outputs of the two previous cells.

    Args:
        channels_before: channels of the output of the second-last cell.
        channels_last: channels of the output of the last cell.
        channels: channels of every state within the cell.
        reduces: whether the cell halves the resolution.
        last_reduced: whether the last cell did, so that the output before it is twice as large.
    """

    def __init__(
        self,
        channels_before: int,
        channels_last: int,
        channels: int,
        reduces: bool,
        last_reduced: bool,
    ) -> None:
        super().__init__()
        self.last = nn.Sequential(*_conv(channels_last, channels, 1, 1))
        self.before: nn.Module = nn.Identity()
        if last_reduced:
            self.before = FactorizedReduce(channels_before, channels)
        elif channels_before != channels:
            self.before = nn.Sequential(*_conv(channels_before, channels, 1, 1))
        genotype = REDUCTION if reduces else NORMAL
        self._gathers = REDUCTION_GATHERS if reduces else NORMAL_GATHERS
        self._takes = [state for state, _ in genotype]
        # only the input states still have the full resolution
        self.operations = nn.ModuleList(
            operation(channels, 2 if reduces and state < 2 else 1) for state, operation in genotype
        )
        self.channels = channels * len(self._gathers)

    def forward(self, both: Pair | Tensor) -> Pair:
        last, before = (both, both) if isinstance(both, Tensor) else both
        states = [self.last(last), self.before(before)]
        steps = list(zip(self.operations, self._takes, strict=True))
        for (first, i), (second, j) in zip(steps[::2], steps[1::2], strict=True):
            states.append(first(states[i]) + second(states[j]))
        return torch.cat([states[state] for state in self._gathers], 1), last


class Head(nn.Module):
    """Global mean and linear layer on the output of the last cell."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, num_classes)

    def forward(self, both: Pair) -> Tensor:
        y: Tensor = self.linear(both[0].mean((2, 3)))
        return y


def amoebanet_d(
    num_classes: int = 10, in_channels: int = 3, layers: int = 18, filters: int = 208
) -> nn.Sequential:
    """AmoebaNet-D (Real et al., 2019) with random weights.

    ``forward`` takes (N, in_channels, H, W) and returns (N, num_classes).

    A stem of a convolution and two reduction cells, three groups of cells with reduction cells
    between them, a linear layer; the total stride is 32.

    Args:
        num_classes: outputs.
        in_channels: channels of the images.
        layers: normal cells, a third of them in each group.
        filters: channels of the states in the first group; a multiple of 16.

    Raises:
        ValueError: layers or filters are not divisible as required.
    """
    if layers < 3 or layers % 3:
        raise ValueError(f"layers={layers} must be a positive multiple of 3 for AmoebaNet-D")
    if filters < 16 or filters % 16:
        raise ValueError(f"filters={filters} must be a multiple of 16")
    channels = filters // 4
    stem = nn.Conv2d(in_channels, channels, 3, 2, padding=1, bias=False)
    norm = nn.BatchNorm2d(channels)
    model = nn.Sequential(OrderedDict(stem=nn.Sequential(OrderedDict(conv=stem, norm=norm))))
    before = last = channels
    last_reduced = False
    for name, reduces in _cells(layers // 3):
        channels *= 2 if reduces else 1
        cell = Cell(before, last, channels, reduces, last_reduced)
        model.add_module(name, cell)
        before, last, last_reduced = last, cell.channels, reduces
    model.add_module("head", Head(last, num_classes))
    return model


def _cells(repeats: int) -> Iterator[tuple[str, bool]]:
    """Iterate over names of cells, and whether they halve the resolution."""
    yield from (("stem_reduction1", True), ("stem_reduction2", True))
    for group in (1, 2, 3):
        yield from [(f"reduction{group - 1}", True)] if group > 1 else []
        yield from ((f"group{group}_cell{number}", False) for number in range(1, repeats + 1))
