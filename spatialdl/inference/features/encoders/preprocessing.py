"""Pre-processing of batches of tiles for an encoder, on the device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INTERPOLATIONS = ("bilinear", "bicubic")
_WHITE = 255


@dataclass(frozen=True)
class Preprocessing:
    """Settings of resize, crop, scale and normalisation.

    Tiles are resized with antialiasing and rounded to integers, as in Pillow. The whole tile is
    resized to `size`, or to `resized` and then cropped.

    Attributes:
        size: rows and columns of the encoder's input.
        mean, std: of red, green and blue, after scaling.
        interpolation: one of `INTERPOLATIONS`.
        resized: rows and columns to which a tile is resized before it is cropped to `size`; None
            for no crop.
        offset: first row and column of the crop.
        scale: factor of pixel values from 0 to 255.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    resized: int | None = None
    offset: int = 0
    scale: float = 1 / _WHITE

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"interpolation={self.interpolation} is not supported: set --interpolation to "
                f"{' or '.join(INTERPOLATIONS)}"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not all(map(isfinite, values)):
                raise ValueError(
                    f"{name} is {', '.join(map(str, values))}, expected three finite numbers, of "
                    f"red, green and blue: add --{name}"
                )
        if min(self.std) <= 0:
            raise ValueError(f"std is {', '.join(map(str, self.std))}, expected numbers above 0")
        if self.resized is not None and not 0 <= self.offset <= self.resized - self.size:
            raise ValueError(
                f"a tile resized to {self.resized} cannot be cropped to {self.size}: leave --crop "
                "out, or lower --input-size"
            )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, for a manifest."""
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std)}


class Preprocess(nn.Module):
    """Module that applies a `Preprocessing`.

    Args:
        steps: the settings.
        dtype: dtype of the output.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, steps: Preprocessing, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._steps = steps
        for name, values in (("mean", steps.mean), ("std", steps.std)):
            self.register_buffer(name, torch.tensor(values, dtype=dtype).view(1, -1, 1, 1))

    def forward(self, tiles: Tensor) -> Tensor:
        """Convert tiles uint8 (N, rows, cols, 3) to images (N, 3, size, size)."""
        steps = self._steps
        images = tiles.permute(0, 3, 1, 2).to(self.mean.dtype)
        side = steps.resized or steps.size
        # columns, then rows, rounding after each, as in Pillow
        for size in ((images.shape[2], side), (side, side)):
            if images.shape[2:] != size:
                images = F.interpolate(
                    images, size, mode=steps.interpolation, align_corners=False, antialias=True
                )
                images = (images + 0.5).floor().clamp(0, _WHITE)  # ties upwards
        if steps.resized is not None:
            kept = slice(steps.offset, steps.offset + steps.size)
            images = images[:, :, kept, kept]
        return (images * steps.scale - self.mean) / self.std

    def scaled(self, pixels: Tensor) -> Tensor:
        """Scale and normalise pixels uint8 (N, rows, cols, 3) to images (N, 3, rows, cols)."""
        images = pixels.permute(0, 3, 1, 2).to(self.mean.dtype).contiguous()
        return images.mul_(self._steps.scale).sub_(self.mean).div_(self.std)


def centred(resized: int, size: int) -> int:
    """Offset of a centre crop, rounded as in timm and torchvision."""
    return round((resized - size) / 2)
