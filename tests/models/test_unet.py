from __future__ import annotations

import pytest
import torch

from spatialdl.models import UNet, unet, unet3d


@pytest.mark.parametrize("size", [(64, 64), (37, 29), (17, 1), (2, 3), (13, 10, 7), (3, 17, 1)])
def test_every_pixel_of_any_image_or_volume_gets_all_classes(size):
    build = UNet if len(size) == 2 else unet3d
    network = build(num_classes=5, in_channels=2, width=2)
    assert network(torch.rand(2, 2, *size)).shape == (2, 5, *size)


def test_a_pixel_moves_along_with_the_image():
    """Upsampled maps align with their skips: shift by 8 = 2 ** depth pixels."""
    torch.manual_seed(0)
    network = unet(width=4, depth=3).double().eval()
    image = torch.rand(1, 3, 131, 131, dtype=torch.float64)
    whole, shifted = network(image), network(image[..., 8:, 8:])
    torch.testing.assert_close(shifted[..., 70:80, 70:80], whole[..., 78:88, 78:88])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        *(({key: 0}, f"{key}=0") for key in ("num_classes", "in_channels", "width", "depth")),
        ({"depth": 10**9}, "depth=1000000000 must be at most 30"),
        ({"dims": 4}, "2 or 3 dims, got dims=4"),
    ],
)
def test_what_makes_no_network_is_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        UNet(**wrong)


def test_a_volume_alike_in_all_planes_is_an_image():
    """With weights on one plane only, each plane of the output equals that of the 2-D network."""
    torch.manual_seed(0)
    flat = UNet(width=2, depth=2).double().eval()
    deep = UNet(width=2, depth=2, dims=3).double().eval()
    weights = deep.state_dict()
    for name, value in flat.state_dict().items():
        if value.shape == weights[name].shape:
            weights[name].copy_(value)
        elif "upsample" in name:
            weights[name].copy_(value[:, :, None].expand_as(weights[name]))
        else:
            weights[name].zero_()
            weights[name][:, :, value.shape[-1] // 2] = value
    image = torch.rand(1, 3, 13, 10, dtype=torch.float64)
    volume = image[:, :, None].expand(-1, -1, 7, -1, -1)
    torch.testing.assert_close(deep(volume), flat(image)[:, :, None].expand(-1, -1, 7, -1, -1))
