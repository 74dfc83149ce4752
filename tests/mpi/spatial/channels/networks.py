"""Networks for divided channels, written here as torchvision and timm write theirs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.models.amoebanet import amoebanet_d
from spatialdl.models.resnet import resnet18
from spatialdl.models.unet import unet, unet3d
from spatialdl.models.vit import VisionTransformer


class Mobile(nn.Module):
    """Depthwise and grouped convolutions, squeeze and excitation, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 24, 1)
        self.depthwise = nn.Conv2d(24, 24, 5, padding=2, groups=24, bias=False)
        self.squeeze, self.excite = nn.Conv2d(24, 6, 1), nn.Conv2d(6, 24, 1)
        self.grouped = nn.Conv2d(24, 16, 3, padding=1, groups=8)
        self.norm = nn.GroupNorm(8, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 9, 2, 2), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.depthwise(F.silu(self.wide(self.stem(x)))))
        weights = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))).sigmoid()
        y = self.up(F.gelu(self.norm(self.grouped(y * weights))))
        return self.out(torch.cat([y, x], 1)).mean((2, 3))


# --- transformers with positions, tokens and tables of their own


class Attention(nn.Module):
    """Attention (N, tokens, C) with dropout of its weights, fused or spelled out."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused, self.dropout = heads, fused, nn.Dropout(0.2)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        samples, tokens, width = x.shape
        shape = samples, tokens, 3, self.heads, width // self.heads
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            p = self.dropout.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        else:
            scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)
            scores = scores if mask is None else scores + mask
            y = self.dropout(scores.softmax(dim=-1)) @ v
        return self.proj(y.transpose(1, 2).reshape(samples, tokens, width))


class Layer(nn.Module):
    """Attention and an MLP behind norms, with scales for each channel, and layers left out."""

    def __init__(self, width: int, attention: nn.Module, drop_path: float = 0.0) -> None:
        super().__init__()
        self.attn, self.drop_path = attention, drop_path
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
        )
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((width,), 0.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.kept(self.attn(self.norm1(x)) * self.gamma1)
        return x + self.kept(self.mlp(self.norm2(x)).mul_(self.gamma2))

    def kept(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_path:
            return x
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(1 - self.drop_path) / (1 - self.drop_path)


class Tokens(nn.Module):
    """A vision transformer with a class token and embedded positions."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        width = 24
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + 5 * 4, width))
        self.pos_drop = nn.Dropout(0.1)
        blocks = (Layer(width, Attention(width, 4, fused), 0.3) for _ in range(2))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.blocks(self.pos_drop(x + self.pos_embed))
        return self.head(self.norm(x)[:, 0])


class Windows(nn.Module):
    """Attention in shifted windows of maps (N, H, W, C), with biases of relative positions.

    Maps that windows do not divide are padded. Shifted windows are masked.
    """

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.attention = Attention(width, heads, True)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        places = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        apart = places[:, None] - places + window - 1
        self.register_buffer("index", apart[..., 0] * (2 * window - 1) + apart[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        samples, height, width, channels = x.shape
        window, shift = self.window, self.shift
        x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
        size = x.shape[1], x.shape[2]
        rows, columns = size[0] // window, size[1] // window
        if shift:
            x = torch.roll(x, shifts=(-shift, -shift), dims=(1, 2))
        x = x.view(samples, rows, window, columns, window, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, window**2, channels)
        x = self.attention(x, self.bias(x, rows, columns))
        x = x.view(samples, rows, columns, window, window, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(samples, *size, channels)
        if shift:
            x = torch.roll(x, shifts=(shift, shift), dims=(1, 2))
        return x[:, :height, :width, :].contiguous()

    def bias(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """(windows or 1, heads, window^2, window^2)."""
        tokens = self.window**2
        bias = self.table[self.index.view(-1)].view(tokens, tokens, -1)
        bias = bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if not self.shift:
            return bias
        mask = self.mask(x, rows, columns)
        mask = mask.view(1, rows * columns, 1, tokens, tokens)
        mask = mask.expand(len(x) // (rows * columns), -1, self.heads, -1, -1)
        return bias + mask.reshape(-1, self.heads, tokens, tokens)

    def mask(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Minus a hundred between tokens that a shift has put side by side."""
        window, shift = self.window, self.shift
        parts = x.new_zeros((rows * window, columns * window))
        cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
        for number, (row, column) in enumerate((r, c) for r in cuts for c in cuts):
            parts[row, column] = number
        parts = parts.view(rows, window, columns, window).permute(0, 2, 1, 3)
        parts = parts.reshape(rows * columns, window**2)
        apart = parts.unsqueeze(1) - parts.unsqueeze(2)
        return torch.zeros_like(apart).masked_fill(apart != 0, -100.0)


class Merging(nn.Module):
    """Four places of a map (N, H, W, C) become one of twice the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, height, width, channels = x.shape
        x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        _, height, width, _ = x.shape
        x = x.reshape(samples, height // 2, 2, width // 2, 2, channels)
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


class Swin(nn.Module):
    """Two stages of two layers, the second with shifted windows; as timm has it."""

    def __init__(self, width: int = 16, window: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        stages: list[nn.Module] = []
        for stage, heads in enumerate((4, 8)):
            wide = width * 2**stage
            stages += [Merging(wide // 2)] if stage else []
            for shift in (0, window // 2):
                stages.append(Layer(wide, Windows(wide, heads, window, shift), 0.2))
        self.layers = nn.Sequential(*stages)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).permute(0, 3, 1, 2).mean((2, 3)))


Network = tuple[Callable[[], nn.Module], tuple[int, ...]]
NETWORKS: dict[str, Network] = {
    "resnet18": (lambda: resnet18(5, width=8), (3, 37, 29)),
    "amoebanet_d": (lambda: amoebanet_d(5, layers=3, filters=16), (3, 64, 48)),
    "unet": (lambda: unet(5, width=6, depth=3), (3, 29, 21)),
    "unet3d": (lambda: unet3d(5, width=5, depth=2), (1, 11, 9, 7)),
    "vit": (lambda: VisionTransformer(5, patch=8, width=24, depth=2, heads=4), (3, 24, 16)),
    "tokens": (lambda: Tokens(fused=True), (3, 40, 32)),
    "tokens, spelled out": (lambda: Tokens(fused=False), (3, 40, 32)),
    "swin": (Swin, (3, 36, 28)),
    "mobile": (Mobile, (3, 20, 18)),
}
