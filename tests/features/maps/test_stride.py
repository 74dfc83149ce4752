from __future__ import annotations

import pytest
from torch import Tensor, nn

from spatialdl.features.maps.stride import Stride, stride_of
from tests.features.maps.networks import Convolved, Pooling, encoder_of


def upsampled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3, 4, 1), nn.AvgPool2d(2), nn.Upsample(scale_factor=2))


class Windows(nn.Module):
    """Takes multiples of its windows of 5 cells."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.conv(images)
        return found.unflatten(3, (-1, 5)).flatten(3)


@pytest.mark.parametrize(
    ("network", "stride", "multiple"),
    [
        (Convolved(), (4, 4), (4, 4)),
        (nn.Conv2d(3, 2, 7), (1, 1), (1, 1)),
        (nn.Conv2d(3, 2, 3, (2, 3)), (2, 3), (2, 3)),
        (nn.Sequential(nn.Conv2d(3, 2, 14, 14), nn.MaxPool2d(3, 2)), (28, 28), (28, 28)),
        (upsampled(), (4, 4), (8, 8)),
        (Windows(), (4, 4), (20, 20)),
    ],
    ids=["padded", "alone", "oblong", "patches", "upsampled", "windows"],
)
def test_strides_of_networks(network, stride, multiple):
    assert stride_of(encoder_of(network, 60)) == Stride(stride, multiple)


def test_maps_that_do_not_grow_evenly_are_refused():
    with pytest.raises(ValueError, match="returns 4 rows for an image of 64 x 64, 4 for one"):
        stride_of(encoder_of(Pooling()))
    finer = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Upsample(scale_factor=2))
    with pytest.raises(ValueError, match="has no regular stride"):
        stride_of(encoder_of(finer))


def test_networks_for_one_size_are_refused():
    class Fixed(nn.Module):
        def forward(self, images):
            return images + images.new_zeros(1, 3, 64, 64)

    with pytest.raises(ValueError, match="does not take images of 30304 x 30304"):
        stride_of(encoder_of(Fixed()))
