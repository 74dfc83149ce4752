"""Small networks in plain PyTorch, and their training, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skip = nn.Conv2d(before, after, 1, stride) if stride != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


def resnet() -> nn.Module:
    """Eight blocks, as ResNet-18 has."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.MaxPool2d(3, 2, 1)]
    for before, after, stride in [(8, 8, 1), (8, 16, 2), (16, 32, 2), (32, 64, 2)]:
        layers += [Block(before, after, stride), Block(after, after, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))


class UNet(nn.Module):
    """Three levels, transposed convolutions on one way up and interpolation on the other."""

    def __init__(self) -> None:
        super().__init__()

        def level(before: int, after: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.SiLU()
            )

        self.top, self.middle, self.bottom = level(3, 8), level(8, 16), level(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.middle_up, self.top_up = level(32, 16), level(24, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        middle = self.middle(F.max_pool2d(top, 2))
        bottom = self.bottom(F.avg_pool2d(middle, 2))
        middle = self.middle_up(torch.cat([middle, self.up(bottom)], 1))
        up = F.interpolate(middle, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.top_up(torch.cat([top, up], 1))).mean((2, 3))


class ViT(nn.Module):
    """Patches, a class token, two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.full((1, 1, 16), 0.1))
        self.places = nn.Parameter(torch.linspace(-1, 1, 17 * 16).view(1, 17, 16))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.places
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens[:, 0]))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"ResNet": resnet, "U-Net": UNet, "ViT": ViT}

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, 0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda weights: torch.optim.AdamW(weights, 0.01),
}


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Images (2, 3, 32, 32) and classes of a step."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(2, 3, 32, 32, dtype=dtype, generator=draw), torch.tensor([step % 4, 1])


def trained(network: str, optimiser: str, device: str, steps: int = 3) -> dict[str, Tensor]:
    """Losses of a few steps in float64, and the weights, gradients and buffers after them."""
    torch.manual_seed(0)
    model = NETWORKS[network]().double().to(device)
    optimizer = OPTIMISERS[optimiser](model.parameters())
    found: dict[str, Tensor] = {}
    for step in range(steps):
        images, classes = (x.to(device, non_blocking=True) for x in batch(step))
        optimizer.zero_grad()
        found[f"loss {step}"] = F.cross_entropy(model(images), classes)
        found[f"loss {step}"].backward()
        optimizer.step()
    found |= {f"gradient of {name}": x.grad for name, x in model.named_parameters()}
    return {name: x.detach().cpu() for name, x in (found | model.state_dict()).items()}
