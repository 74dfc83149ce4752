"""Small encoders of maps, and regions of given pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.inference.features.encoders.encoder import Encoder, Preprocessing
from spatialdl.inference.features.maps.regions import SlideRegion
from spatialdl.inference.predicting.inputs import SlideImages
from tests.inference.predicting.runs import write_slide

STEPS = Preprocessing(64, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3))


class Convolved(nn.Module):
    """A map of stride 4; BatchNorm has non-initial statistics."""

    input_size = 64
    mean, std = STEPS.mean, STEPS.std

    def __init__(self, width: int = 10, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 7, 1, 3),
            nn.GELU(),
            nn.MaxPool2d(3, 2, 1),
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in (*self.parameters(), self.layers[1].running_mean):
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images)
        return found


class Pooling(Convolved):
    """A map of fixed size for any image size."""

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(super().forward(images), 4)


def encoder_of(network: nn.Module, size: int = 64) -> Encoder:
    """An encoder as returned by `make_encoder`."""
    network.eval().requires_grad_(False)
    return Encoder(network, Preprocessing(size, STEPS.mean, STEPS.std), "made up")


def region_of(path: Path, size: tuple[int, int], **more: Any) -> SlideRegion:
    """A slide of these rows and columns, whose region is the whole slide."""
    if not path.exists():
        write_slide(path, *size)
    return SlideRegion(path.stem, SlideImages(path, 0.5, [(0, 0)], size, 1.0, **more), size, 0.5)


def mapped(network: nn.Module, region: SlideRegion) -> Tensor:
    """The map (width, rows, columns) of a region in one piece, in float64."""
    pixels = torch.from_numpy(region.images.read(0).copy()).permute(2, 0, 1).double() / 255
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (STEPS.mean, STEPS.std)
    )
    with torch.no_grad():
        found: Tensor = network.double().eval()(((pixels - mean) / std)[None])[0]
    return found
