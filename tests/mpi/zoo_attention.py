"""Small transformers by the way they attend: written here, built as the networks of `zoo`.

Class tokens that attend at the end, outlooks, cross-covariance, two branches, tubes of volumes, and
signals. The numbers of tokens are such that no grid divides them.
"""

from __future__ import annotations

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

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(-2, -1) for each in heads_of(self.qkv(x), 3))
        q, k = F.normalize(q, dim=-1) * self.temperature, F.normalize(k, dim=-1)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.permute(0, 3, 1, 2).flatten(2))


class CovarianceLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Layer(Covariance()), nn.LayerNorm(WIDTH)
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


TOKENS_7X5 = (28, 20)  # 7 x 5 tokens

ATTENTION: dict[str, Entry] = {
    "class attention, talking heads": Entry(
        lambda: ClassTransformer([Layer(TalkingHeads())], fused=False), TOKENS_7X5
    ),
    "outlooks": Entry(
        lambda: ClassTransformer([Layer(Outlook(1)), Layer(SelfAttention())], maps=True), TOKENS_7X5
    ),
    "outlooks, every other place": Entry(
        lambda: ClassTransformer([Layer(Outlook(2))], apart=False, maps=True), TOKENS_7X5
    ),
    "cross-covariance": Entry(
        lambda: ClassTransformer([CovarianceLayer()], apart=False), TOKENS_7X5
    ),
    "two branches": Entry(partial(TwoBranches, (42, 30)), (42, 30)),
}

SIGNALS: dict[str, Entry] = {
    "a signal": Entry(partial(Tubes, (44,), False, True), (44,)),
    "a signal, spelled out": Entry(partial(Tubes, (44,), True, False), (44,)),
}

TUBES: dict[str, Entry] = {
    "tubes, class token": Entry(partial(Tubes, (12, 20, 12), False, True), (12, 20, 12)),
    "tubes, mean": Entry(partial(Tubes, (12, 20, 12), True, False), (12, 20, 12)),
}
