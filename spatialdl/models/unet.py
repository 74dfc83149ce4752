"""U-Net: segmentation of images (H, W) or volumes (D, H, W).

Ronneberger, Fischer, Brox: "U-Net: Convolutional Networks for Biomedical Image Segmentation",
MICCAI 2015 (https://arxiv.org/abs/1505.04597); for volumes Çiçek et al., "3D U-Net", MICCAI 2016
(https://arxiv.org/abs/1606.06650), with channels doubling as in the former. Unlike in the papers,
every 3-wide convolution is padded and followed by BatchNorm, so the output has the image's size.

Images may have any size: pooling rounds odd sizes up, and the upsampled map is cropped by a plane,
row or column before it is concatenated with its skip.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MOST_HALVINGS = 30
_CONVOLUTION = {2: nn.Conv2d, 3: nn.Conv3d}
_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
_UPSAMPLE = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class DoubleConvolution(nn.Module):
    """Two blocks of a 3-wide convolution, BatchNorm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int, dims: int = 2) -> None:
        super().__init__()
        convolution, norm = _CONVOLUTION[dims], _NORM[dims]
        self.conv1 = convolution(in_channels, out_channels, 3, padding=1, bias=False)
        self.bn1 = norm(out_channels)
        self.conv2 = convolution(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = norm(out_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """U-Net: 31 million parameters at width 64 and depth 4, as in the paper.

    ``forward`` takes (N, in_channels, H, W) and returns (N, num_classes, H, W); with ``dims=3``,
    (N, in_channels, D, H, W) and (N, num_classes, D, H, W).

    Args:
        num_classes: channels of the output.
        in_channels: channels of the image.
        width: channels at full resolution; they double at every halving.
        depth: halvings.
        dims: 2 for images, 3 for volumes.

    Raises:
        ValueError: one of the first four is smaller than 1, or `dims` is not 2 or 3.
    """

    def __init__(
        self,
        num_classes: int = 2,
        in_channels: int = 3,
        width: int = 64,
        depth: int = 4,
        dims: int = 2,
    ) -> None:
        super().__init__()
        if dims not in _CONVOLUTION:
            raise ValueError(f"a U-Net is for images of 2 or 3 dims, got dims={dims}")
        if min(num_classes, in_channels, width, depth) < 1:
            raise ValueError(
                "a U-Net needs at least 1 class, channel and halving, got "
                f"num_classes={num_classes}, in_channels={in_channels}, width={width}, "
                f"depth={depth}"
            )
        if depth > _MOST_HALVINGS:
            raise ValueError(f"depth={depth} must be at most {_MOST_HALVINGS}")
        widths = [width * 2**level for level in range(depth + 1)]
        self.encoder = nn.ModuleList(
            DoubleConvolution(*channels, dims)
            for channels in zip([in_channels, *widths[:-1]], widths, strict=True)
        )
        self.pool = _POOL[dims](2, ceil_mode=True)
        rising = widths[-2::-1]
        up = _UPSAMPLE[dims]
        self.upsample = nn.ModuleList(up(2 * c, c, 2, stride=2) for c in rising)
        self.decoder = nn.ModuleList(DoubleConvolution(2 * c, c, dims) for c in rising)
        self.head = _CONVOLUTION[dims](width, num_classes, 1)
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

    ``forward`` takes (N, in_channels, H, W) and returns (N, num_classes, H, W).

    Args:
        num_classes: channels of the output.
        in_channels: channels of the image.
        width: channels at full resolution; they double at every halving.
        depth: halvings.

    Raises:
        ValueError: if one of them is smaller than 1.
    """
    return UNet(num_classes, in_channels, width, depth)


def unet3d(num_classes: int = 2, in_channels: int = 1, width: int = 32, depth: int = 3) -> UNet:
    """A U-Net for volumes (Çiçek et al., 2016), see `UNet`.

    ``forward`` takes (N, in_channels, D, H, W) and returns (N, num_classes, D, H, W).

    Args:
        num_classes: channels of the output.
        in_channels: channels of the volume.
        width: channels at full resolution; they double at every halving.
        depth: halvings.

    Raises:
        ValueError: if one of them is smaller than 1.
    """
    return UNet(num_classes, in_channels, width, depth, dims=3)


def _cropped(x: Tensor, like: Tensor) -> Tensor:
    """Crop `x` to the spatial size of `like`."""
    pairs = zip(reversed(like.shape[2:]), reversed(x.shape[2:]), strict=True)
    more = [wanted - there for wanted, there in pairs]
    return F.pad(x, [n for side in more for n in (0, side)]) if any(more) else x


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Conv3d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
