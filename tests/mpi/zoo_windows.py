"""Small transformers that attend in windows: written here, built as the networks of `zoo`.

With global queries, in dilated grids, mask units and neighbourhoods.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mpi.zoo import Entry
from tests.mpi.zoo_attention import (
    CLASSES,
    HEADS,
    TOKENS_7X5,
    WIDTH,
    Layer,
    Patches,
    SelfAttention,
    attended,
    heads_of,
    joined,
)


def windows_of(x: Tensor, window: int) -> Tensor:
    """(N, H, W, C) as (N * windows, window * window, C)."""
    samples, height, width, channels = x.shape
    x = x.view(samples, height // window, window, width // window, window, channels)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window * window, channels)


def windows_back(x: Tensor, window: int, size: tuple[int, int]) -> Tensor:
    height, width = size
    x = x.view(-1, height // window, width // window, window, window, x.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, height, width, x.shape[-1])


class GlobalQueries(nn.Module):
    """Windows whose queries are those of one small map of the whole image."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.kv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, window**2, window**2))
        self.window = window

    def forward(self, x: Tensor, queries: Tensor) -> Tensor:
        windows = windows_of(x, self.window)
        k, v = heads_of(self.kv(windows), 2)
        q = queries.repeat_interleave(len(windows) // len(queries), dim=0)
        (q,) = heads_of(q.reshape(*windows.shape), 1)
        y = (q @ k.transpose(-2, -1) + self.bias).softmax(-1) @ v
        return windows_back(self.out(joined(y)), self.window, tuple(x.shape[1:3]))


class GlobalWindows(nn.Module):
    """Pooled down to one window, a map gives the queries of all windows."""

    def __init__(self, window: int = 3, halvings: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        pools = (
            [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.MaxPool2d(3, 2, 1)] for _ in range(halvings)
        )
        self.down = nn.Sequential(*(layer for pool in pools for layer in pool))
        self.layers = nn.ModuleList(Layer(GlobalQueries(window)) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        queries, x = self.down(x).permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x, queries)
        return self.head(x.mean((1, 2)))


class GridAttention(nn.Module):
    """Tokens that lie a part of the image apart attend to each other; channels last or first."""

    def __init__(self, grid: int, fused: bool) -> None:
        super().__init__()
        self.attention, self.grid = SelfAttention(fused), grid

    def forward(self, x: Tensor) -> Tensor:
        samples, height, width, channels = x.shape
        grid, rows, columns = self.grid, height // self.grid, width // self.grid
        y = x.view(samples, grid, rows, grid, columns, channels)
        y = y.permute(0, 2, 4, 1, 3, 5).contiguous().view(-1, grid, grid, channels)
        y = self.attention(y).view(-1, rows, columns, grid, grid, channels)
        return y.permute(0, 3, 1, 4, 2, 5).contiguous().view(samples, height, width, channels)


class GridAttentionFirst(GridAttention):
    def forward(self, x: Tensor) -> Tensor:
        samples, height, width, channels = x.shape
        grid, rows, columns = self.grid, height // self.grid, width // self.grid
        y = x.permute(0, 3, 1, 2).view(samples, channels, grid, rows, grid, columns)
        y = y.permute(0, 3, 5, 1, 2, 4).contiguous().view(-1, channels, grid, grid)
        y = self.attention(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = y.contiguous().view(-1, rows, columns, channels, grid, grid)
        y = y.permute(0, 3, 4, 1, 5, 2).contiguous().view(samples, channels, height, width)
        return y.permute(0, 2, 3, 1)


class WindowAttention(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.attention, self.window = SelfAttention(fused=False), window

    def forward(self, x: Tensor) -> Tensor:
        return windows_back(
            self.attention(windows_of(x, self.window)), self.window, tuple(x.shape[1:3])
        )


class PooledWindows(nn.Module):
    """Windows, padded to whole ones, whose queries are pooled, so that the map is halved.

    As in the encoder of SAM 2 (HieraDet).
    """

    def __init__(self, window: int, pool: nn.Module, fused: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.skip, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.window, self.pool, self.fused = window, pool, fused

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        skip = self.pooled(self.skip(y))
        height, width = x.shape[1:3]
        y = F.pad(y, (0, 0, 0, -width % self.window, 0, -height % self.window))
        padded = tuple(size // 2 for size in y.shape[1:3])
        q, k, v = self.qkv(windows_of(y, self.window)).chunk(3, -1)
        q = self.pooled(q.unflatten(1, (self.window, self.window))).flatten(1, 2)
        heads = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
        y = windows_back(joined(attended(*heads, self.fused)), self.window // 2, padded)
        height, width = skip.shape[1:3]
        return skip + self.out(y[:, :height, :width])

    def pooled(self, x: Tensor) -> Tensor:
        return self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class MaskUnits(nn.Module):
    """Tokens in an order in which mask units, and what is pooled, are far apart."""

    def __init__(self, size: tuple[int, int], depth: int = 2) -> None:
        super().__init__()
        self.patches, self.size, self.depth = Patches(), size, depth
        self.positions = nn.Parameter(torch.randn(1, prod(size), WIDTH))
        self.qkvs = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth + 1))
        self.skips = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.patches(x)
        x = self.unrolled(x + self.positions)
        for number, skip in enumerate(self.skips):
            y = self.norm(x)
            x = skip(y).view(len(x), 4, -1, WIDTH).amax(1)
            x = x + self.unit_attention(self.qkvs[number](y), 4 ** (self.depth - 1 - number))
        y = self.qkvs[-1](self.norm(x))
        x = x + joined(attended(*heads_of(y, 3), fused=False))
        return self.head(x.mean(1))

    def unrolled(self, x: Tensor) -> Tensor:
        """2 x 2 tokens that become one are a quarter of the sequence apart, again and again."""
        samples, (height, width) = len(x), self.size
        x = x.view(samples, height, width, WIDTH)
        for _ in range(self.depth):
            height, width = height // 2, width // 2
            x = x.view(-1, height, 2, width, 2, WIDTH).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        return x.reshape(samples, -1, WIDTH)

    def unit_attention(self, qkv: Tensor, unit: int) -> Tensor:
        samples, tokens, _ = qkv.shape
        units = tokens // (4 * unit)
        qkv = qkv.reshape(samples, -1, units, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(3, 0, 4, 2, 1, 5).unbind(0)
        q = q.view(samples, HEADS, units, 4, -1, WIDTH // HEADS).amax(3)
        return attended(q, k, v, fused=False).transpose(1, 3).reshape(samples, -1, WIDTH)


class Maps(nn.Module):
    """Layers over maps (N, H, W, C)."""

    def __init__(self, *attention: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.layers = nn.Sequential(
            *(one if isinstance(one, PooledWindows) else Layer(one) for one in attention)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x).permute(0, 2, 3, 1)).mean((1, 2)))


# --- neighbourhoods


def replicated(windows: Tensor, side: int) -> Tensor:
    """Windows at the border are those of the next place that has a whole one."""
    samples, heads, channels, area, height, width = windows.shape
    flat = windows.reshape(samples, -1, height, width)
    padded = F.pad(flat, (side,) * 4, mode="replicate")
    return padded.reshape(samples, heads, channels, area, height + 2 * side, width + 2 * side)


class Neighbourhood(nn.Module):
    """Each token attends to the K x K tokens nearest to it.

    Args:
        how: the keys of a window are found: by `F.unfold` ("unfold"), by computed indices
            ("indices"), or by `F.unfold` of zeros around the image, which are masked ("masked").
    """

    def __init__(self, how: str, kernel: int = 3) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how, self.kernel = how, kernel
        self.bias = nn.Parameter(torch.randn(HEADS, kernel**2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        samples, height, width, _ = x.shape
        qkv = self.qkv(x).reshape(samples, height, width, 3, HEADS, -1).permute(3, 0, 4, 5, 1, 2)
        q, (k, v) = qkv[0], (self.windows(each) for each in qkv[1:])
        scores = (q.unsqueeze(3) * k).sum(2) + self.bias
        if self.how == "masked":
            inside = self.windows(torch.ones_like(q[:, :, :1])).squeeze(2)
            scores = scores.masked_fill(inside == 0, float("-inf"))
        y = (scores.softmax(2).unsqueeze(2) * v).sum(3)
        return self.out(y.flatten(1, 2).permute(0, 2, 3, 1))

    def windows(self, x: Tensor) -> Tensor:
        """(N, heads, C, K * K, H, W)."""
        (samples, heads, channels, height, width), kernel = x.shape, self.kernel
        side, flat = kernel // 2, x.flatten(1, 2)
        shape = (samples, heads, channels, kernel**2)
        inner = (height - 2 * side, width - 2 * side)
        if self.how == "indices":
            return (
                x[..., self.near(height)[:, :, None, None], self.near(width)]
                .permute(0, 1, 2, 4, 6, 3, 5)
                .flatten(3, 4)
            )
        if self.how == "masked":
            return F.unfold(flat, kernel, padding=side).reshape(*shape, height, width)
        return replicated(F.unfold(flat, kernel).reshape(*shape, *inner), side)

    def near(self, size: int) -> Tensor:
        """For each place the indices of its window."""
        first = (torch.arange(size) - self.kernel // 2).clamp(0, size - self.kernel)
        return first[:, None] + torch.arange(self.kernel)


_WINDOWS = (48, 48)  # 12 x 12 tokens, 4 x 4 windows of 3 x 3


def _maps(*attention: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Maps(*(make() for make in attention))


WINDOWS: dict[str, Entry] = {
    "global queries": Entry(GlobalWindows, _WINDOWS),
    "windows and grid": Entry(
        _maps(partial(WindowAttention, 3), partial(GridAttention, 3, True)), _WINDOWS
    ),
    "grid, channels first": Entry(_maps(partial(GridAttentionFirst, 4, False)), _WINDOWS),
    "pooled windows, padded": Entry(
        _maps(
            partial(PooledWindows, 4, nn.MaxPool2d(2, 2), fused=False),
            partial(PooledWindows, 2, nn.AvgPool2d(2, 2, ceil_mode=True), fused=True),
        ),
        (40, 44),  # 10 x 11 tokens, then 5 x 5
    ),
    "mask units": Entry(partial(MaskUnits, (12, 20)), (48, 80)),
    **{
        f"neighbourhoods by {how}": Entry(_maps(partial(Neighbourhood, how)), TOKENS_7X5)
        for how in ("unfold", "indices", "masked")
    },
    "dilated neighbourhoods": Entry(
        _maps(partial(GridAttention, 4, False), partial(Neighbourhood, "unfold", 5)), _WINDOWS
    ),
}
