"""U-Net: a class for every pixel.

Ronneberger, Fischer, Brox: "U-Net: Convolutional Networks for Biomedical Image Segmentation",
MICCAI 2015 (https://arxiv.org/abs/1505.04597). As is usual today, BatchNorm follows every 3x3
convolution, and these pad, so the output has the size of the image.

Images may have any size: where a size is odd, pooling rounds up, and the upsampled map is cropped
by a row or column before it meets its skip.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MOST_HALVINGS = 30


class DoubleConvolution(nn.Module):
    """Twice a 3x3 convolution, BatchNorm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """U-Net: 31 million parameters at width 64 and depth 4, as in the paper.

    ``forward`` takes (N, in_channels, H, W) and gives (N, num_classes, H, W).

    Args:
        num_classes: channels of the output.
        in_channels: channels of the image.
        width: channels at full resolution; they double at every halving.
        depth: halvings.

    Raises:
        ValueError: if one of them is smaller than 1.
    """

    def __init__(
        self, num_classes: int = 2, in_channels: int = 3, width: int = 64, depth: int = 4
    ) -> None:
        super().__init__()
        if min(num_classes, in_channels, width, depth) < 1:
            raise ValueError(
                "a U-Net needs at least 1 class, channel and halving, got "
                f"num_classes={num_classes}, in_channels={in_channels}, width={width}, "
                f"depth={depth}"
            )
        if depth > _MOST_HALVINGS:
            raise ValueError(f"depth={depth}: no image can be halved so often")
        widths = [width * 2**level for level in range(depth + 1)]
        self.encoder = nn.ModuleList(
            DoubleConvolution(*channels)
            for channels in zip([in_channels, *widths[:-1]], widths, strict=True)
        )
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        rising = widths[-2::-1]
        self.upsample = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, stride=2) for c in rising)
        self.decoder = nn.ModuleList(DoubleConvolution(2 * c, c) for c in rising)
        self.head = nn.Conv2d(width, num_classes, 1)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.encoder):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for upsample, block in zip(self.upsample, self.decoder, strict=True):
            skip = skips.pop()
            x = block(torch.cat([skip, _cropped(upsample(x), skip)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


def unet(num_classes: int = 2, in_channels: int = 3, width: int = 64, depth: int = 4) -> UNet:
    """A U-Net (Ronneberger et al., 2015), see `UNet`.

    ``forward`` takes (N, in_channels, H, W) and gives (N, num_classes, H, W).

    Args:
        num_classes: channels of the output.
        in_channels: channels of the image.
        width: channels at full resolution; they double at every halving.
        depth: halvings.

    Raises:
        ValueError: if one of them is smaller than 1.
    """
    return UNet(num_classes, in_channels, width, depth)


def _cropped(x: Tensor, like: Tensor) -> Tensor:
    """`x` without the last row or column that `like` does not have."""
    rows, cols = like.shape[-2] - x.shape[-2], like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, cols, 0, rows)) if rows or cols else x


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
