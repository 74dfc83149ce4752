"""Small networks, and their training, on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl.models import resnet18, unet, vit


class Mean(nn.Module):
    """Of what a network gives to every pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet": partial(resnet18, 4, width=4),
    "U-Net": lambda: nn.Sequential(unet(4, width=4, depth=2), Mean()),
    "ViT": partial(vit, 4, patch=8, width=16, depth=2, heads=2),
}

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
