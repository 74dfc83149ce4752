"""Small transformers by the way they attend: written here, built as the networks of `zoo`.

Class tokens that attend at the end, outlooks, cross-covariance, two branches, global queries of
windows, dilated grids, mask units, neighbourhoods, tubes of volumes, and signals. The numbers of
tokens are such that no grid divides them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mpi.zoo import Entry

WIDTH, HEADS, CLASSES = 8, 2, 5
_CONVS: dict[int, type[nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


def heads_of(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Of (N, tokens, count * C): so many of (N, heads, tokens, C / heads)."""
    samples, tokens, _ = x.shape
    return x.reshape(samples, tokens, count, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)


def joined(x: Tensor) -> Tensor:
    """(N, heads, tokens, C) as (N, tokens, heads * C)."""
    return x.transpose(1, 2).flatten(2)


def attended(q: Tensor, k: Tensor, v: Tensor, fused: bool) -> Tensor:
    if fused:
        return F.scaled_dot_product_attention(q, k, v)
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1) @ v


class Patches(nn.Module):
    """Tokens (N, tokens, C) of an image, and the sizes of their map."""

    def __init__(self, dims: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.convolution = _CONVS[dims](3, WIDTH, patch, patch)

    def forward(self, x: Tensor) -> tuple[Tensor, torch.Size]:
        x = self.convolution(x)
        return x.flatten(2).transpose(1, 2), x.shape[2:]


class Layer(nn.Module):
    """A layer of a transformer, whose attention is another module."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), *others)
        return x + self.mlp(self.norm2(x))


class SelfAttention(nn.Module):
    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), fused

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        y = joined(attended(*heads_of(self.qkv(x.reshape(len(x), -1, WIDTH)), 3), self.fused))
        return self.out(y).reshape(shape)


# --- class tokens that attend at the end


class TalkingHeads(nn.Module):
    """Heads are mixed before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_of(self.qkv(x), 3)
        scores = self.before((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out(joined(weights @ v))


class ClassAttention(nn.Module):
    """What the first token makes of all of them."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.fused = nn.Linear(WIDTH, WIDTH), fused

    def forward(self, x: Tensor) -> Tensor:
        (q,), (k, v) = heads_of(self.q(x[:, :1]), 1), heads_of(self.kv(x), 2)
        return self.out(joined(attended(q, k, v, self.fused)))


class ClassLayer(nn.Module):
    """Changes the class token alone, in place among the others or as a tensor of its own."""

    def __init__(self, fused: bool, apart: bool) -> None:
        super().__init__()
        self.attention, self.apart = ClassAttention(fused), apart
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.GELU()

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        if self.apart:
            token = token + self.attention(self.norm1(torch.cat([token, x], 1)))
            return token + self.mlp(self.norm2(token))
        y = self.norm1(torch.cat([token, x], 1))
        y = torch.cat([token, x], 1) + torch.cat([self.attention(y), y[:, 1:]], 1)
        y = torch.cat([self.norm2(y[:, :1]), y[:, 1:]], 1)
        return (y + torch.cat([self.mlp(y[:, :1]), y[:, 1:]], 1))[:, :1]


class ClassTransformer(nn.Module):
    """Layers over tokens or maps (N, H, W, C), then layers in which a class token looks at them."""

    def __init__(
        self, layers: list[nn.Module], fused: bool = True, apart: bool = True, maps: bool = False
    ) -> None:
        super().__init__()
        self.patches, self.layers = Patches(), nn.ModuleList(layers)
        self.last = nn.ModuleList(ClassLayer(fused, apart) for _ in range(2))
        self.token, self.maps = nn.Parameter(torch.randn(1, 1, WIDTH)), maps
        self.head, self.dense_head = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, size = self.patches(x)
        x = x.unflatten(1, size) if self.maps else x
        for layer in self.layers:
            x = layer(x, size) if isinstance(layer, CovarianceLayer) else layer(x)
        x = x.reshape(len(x), -1, WIDTH)
        token = self.token.expand(len(x), -1, -1)
        for layer in self.last:
            token = layer(x, token)
        x = torch.cat([token, x], 1)
        return self.head(x[:, 0]) + 0.5 * self.dense_head(x[:, 1:]).max(1)[0]


class Outlook(nn.Module):
    """Each place weighs the windows around it, which are folded up again."""

    def __init__(self, stride: int, kernel: int = 3) -> None:
        super().__init__()
        self.steps = {"kernel_size": kernel, "padding": kernel // 2, "stride": stride}
        self.pool = nn.AvgPool2d(stride, stride, ceil_mode=True)
        self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights, self.area = nn.Linear(WIDTH, HEADS * kernel**4), kernel**2

    def forward(self, x: Tensor) -> Tensor:
        samples, *size, _ = x.shape
        v = F.unfold(self.v(x).permute(0, 3, 1, 2), **self.steps)
        v = v.reshape(samples, HEADS, WIDTH // HEADS, self.area, -1).permute(0, 1, 4, 3, 2)
        weights = self.weights(self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        weights = weights.reshape(samples, -1, HEADS, self.area, self.area).transpose(1, 2)
        y = (weights.softmax(-1) @ v).permute(0, 1, 4, 3, 2).reshape(samples, WIDTH * self.area, -1)
        return self.out(F.fold(y, tuple(size), **self.steps).permute(0, 2, 3, 1))


class Covariance(nn.Module):
    """Channels attend to channels; their products are sums over all tokens."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), fused
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(-2, -1) for each in heads_of(self.qkv(x), 3))
        q, k = F.normalize(q, dim=-1) * self.temperature, F.normalize(k, dim=-1)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:
            y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.permute(0, 3, 1, 2).flatten(2))


class CovarianceLayer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.layer, self.norm = Layer(Covariance(fused)), nn.LayerNorm(WIDTH)
        self.convolutions = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
            nn.GELU(),
            nn.BatchNorm2d(WIDTH),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
        )

    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        x = self.layer(x)
        image = self.norm(x).permute(0, 2, 1).reshape(len(x), WIDTH, *size)
        return x + self.convolutions(image).reshape(len(x), WIDTH, -1).permute(0, 2, 1)


class TwoBranches(nn.Module):
    """Patches of two sizes of an image in two sizes; the class token of each looks at the other."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = tuple(side * 2 // 3 for side in size)
        self.patches = nn.ModuleList([Patches(patch=3), Patches(patch=4)])
        self.layers = nn.ModuleList([Layer(SelfAttention()), Layer(SelfAttention(fused=False))])
        self.tokens = nn.ParameterList(torch.randn(1, 1, WIDTH) for _ in range(2))
        counts = prod(side // 3 for side in size), prod(side // 4 for side in self.size)
        self.positions = nn.ParameterList(torch.randn(1, 1 + n, WIDTH) for n in counts)
        self.across = nn.ModuleList(ClassAttention(fused=False) for _ in range(2))
        self.there = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scaled = F.interpolate(x, self.size, mode="bicubic", align_corners=False)
        branches = []
        for number, image in enumerate((x, scaled)):
            pixels, _ = self.patches[number](image)
            token = self.tokens[number].expand(len(x), -1, -1)
            y = torch.cat([token, pixels], 1) + self.positions[number]
            branches.append(self.layers[number](y))
        for _ in range(2):
            branches = [self.fused(branches, number) for number in range(2)]
        return sum(head(y[:, 0]) for head, y in zip(self.heads, branches, strict=True)) / 2

    def fused(self, branches: list[Tensor], number: int) -> Tensor:
        own, other = branches[number], branches[1 - number]
        token = self.there[number](own[:, :1])
        tokens = self.norms[number](torch.cat([token, other[:, 1:]], 1))
        token = token + self.across[number](tokens)
        return torch.cat([self.back[number](token), own[:, 1:]], 1)


# --- windows and grids


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

    def __init__(self, window: int, fused: bool) -> None:
        super().__init__()
        self.kv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, window**2, window**2))
        self.window, self.fused = window, fused

    def forward(self, x: Tensor, queries: Tensor) -> Tensor:
        windows = windows_of(x, self.window)
        k, v = heads_of(self.kv(windows), 2)
        q = queries.repeat_interleave(len(windows) // len(queries), dim=0)
        (q,) = heads_of(q.reshape(*windows.shape), 1)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, self.bias)
        else:
            y = (q @ k.transpose(-2, -1) + self.bias).softmax(-1) @ v
        return windows_back(self.out(joined(y)), self.window, tuple(x.shape[1:3]))


class GlobalWindows(nn.Module):
    """Pooled down to one window, a map gives the queries of all windows."""

    def __init__(self, fused: bool, window: int = 3, halvings: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        pools = (
            [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.MaxPool2d(3, 2, 1)] for _ in range(halvings)
        )
        self.down = nn.Sequential(*(layer for pool in pools for layer in pool))
        self.layers = nn.ModuleList(Layer(GlobalQueries(window, fused)) for _ in range(2))
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


class MaskUnits(nn.Module):
    """Tokens in an order in which mask units, and what is pooled, are far apart."""

    def __init__(self, size: tuple[int, int], fused: bool, depth: int = 2) -> None:
        super().__init__()
        self.patches, self.size, self.fused, self.depth = Patches(), size, fused, depth
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
        x = x + joined(attended(*heads_of(y, 3), self.fused))
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
        return attended(q, k, v, self.fused).transpose(1, 3).reshape(samples, -1, WIDTH)


class Maps(nn.Module):
    """Layers over maps (N, H, W, C)."""

    def __init__(self, *attention: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.layers = nn.Sequential(*map(Layer, attention))
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
        how: the keys of a window are found: by `F.unfold` ("unfold"), by `Tensor.unfold`
            ("views"), by slices ("slices"), by computed indices ("indices"), or by `F.unfold` of
            zeros around the image, which are masked ("masked").
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
        if self.how == "unfold":
            return replicated(F.unfold(flat, kernel).reshape(*shape, *inner), side)
        if self.how == "views":
            windows = x.unfold(3, kernel, 1).unfold(4, kernel, 1)
            windows = windows.permute(0, 1, 2, 5, 6, 3, 4).flatten(3, 4)
            return replicated(windows, side)
        places = [(i, j) for i in range(kernel) for j in range(kernel)]
        shifted = [x[..., i : i + inner[0], j : j + inner[1]] for i, j in places]
        return replicated(torch.stack(shifted, 3), side)

    def near(self, size: int) -> Tensor:
        """For each place the indices of its window."""
        first = (torch.arange(size) - self.kernel // 2).clamp(0, size - self.kernel)
        return first[:, None] + torch.arange(self.kernel)


# --- signals and volumes


class Tubes(nn.Module):
    """Tokens of signals, images or volumes; a class token, or the mean of all, is read."""

    def __init__(self, size: tuple[int, ...], pools: bool, fused: bool) -> None:
        super().__init__()
        self.patches, self.pools = Patches(len(size)), pools
        count = prod(side // 4 for side in size)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, count, WIDTH))
        self.layers = nn.Sequential(*(Layer(SelfAttention(fused)) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)[0] + self.positions
        if not self.pools:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.layers(x)
        return self.head(self.norm(x.mean(1)) if self.pools else self.norm(x)[:, 0])


_SIZE = (28, 20)  # 7 x 5 tokens
_WINDOWS = (48, 48)  # 12 x 12 tokens, 4 x 4 windows of 3 x 3


def _maps(*attention: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Maps(*(make() for make in attention))


ATTENTION: dict[str, Entry] = {
    "class attention, talking heads": Entry(
        lambda: ClassTransformer([Layer(TalkingHeads())], fused=False), _SIZE
    ),
    "class attention, fused": Entry(lambda: ClassTransformer([Layer(SelfAttention())]), _SIZE),
    "outlooks": Entry(
        lambda: ClassTransformer([Layer(Outlook(1)), Layer(SelfAttention())], maps=True), _SIZE
    ),
    "outlooks, every other place": Entry(
        lambda: ClassTransformer([Layer(Outlook(2))], apart=False, maps=True), _SIZE
    ),
    "cross-covariance": Entry(
        lambda: ClassTransformer([CovarianceLayer(False)], apart=False), _SIZE
    ),
    "cross-covariance, fused": Entry(lambda: ClassTransformer([CovarianceLayer(True)]), _SIZE),
    "two branches": Entry(partial(TwoBranches, (42, 30)), (42, 30)),
    "global queries": Entry(partial(GlobalWindows, False), _WINDOWS),
    "global queries, fused": Entry(partial(GlobalWindows, True), _WINDOWS),
    "windows and grid": Entry(
        _maps(partial(WindowAttention, 3), partial(GridAttention, 3, True)), _WINDOWS
    ),
    "grid, channels first": Entry(_maps(partial(GridAttentionFirst, 4, False)), _WINDOWS),
    "mask units": Entry(partial(MaskUnits, (12, 20), True), (48, 80)),
    "mask units, spelled out": Entry(partial(MaskUnits, (12, 20), False), (48, 80)),
    **{
        f"neighbourhoods by {how}": Entry(_maps(partial(Neighbourhood, how)), _SIZE)
        for how in ("unfold", "views", "slices", "indices", "masked")
    },
    "dilated neighbourhoods": Entry(
        _maps(partial(GridAttention, 4, False), partial(Neighbourhood, "unfold", 5)), _WINDOWS
    ),
}

SIGNALS: dict[str, Entry] = {
    "a signal": Entry(partial(Tubes, (44,), False, True), (44,)),
    "a signal, spelled out": Entry(partial(Tubes, (44,), True, False), (44,)),
}

TUBES: dict[str, Entry] = {
    "tubes, class token": Entry(partial(Tubes, (12, 20, 12), False, True), (12, 20, 12)),
    "tubes, mean": Entry(partial(Tubes, (12, 20, 12), True, False), (12, 20, 12)),
}
