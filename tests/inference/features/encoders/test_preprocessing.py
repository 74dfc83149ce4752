"""Pre-processing of tiles, also that of user-defined encoders; resizing agrees with Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from spatialdl.inference.features.encoders.encoder import Preprocess, Preprocessing, Wish, centred
from spatialdl.inference.features.encoders.making import make_encoder
from tests.inference.features.tiny import Tiny

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)


def tiles_of(side: int, count: int = 3) -> torch.Tensor:
    """Smooth images with some noise, like tissue."""
    generator = torch.Generator().manual_seed(side)
    coarse = torch.rand(count, 3, 6, 6, generator=generator) * 255
    fine = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic")
    noise = torch.randn(fine.shape, generator=generator) * 20
    return (fine + noise).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def levels(images: torch.Tensor) -> torch.Tensor:
    """From 0 to 255, (tiles, rows, cols, 3)."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return ((images.double() * std + mean) * 255).permute(0, 2, 3, 1)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("side", "size"), [(96, 40), (30, 41), (64, 64)])
def test_tiles_are_resized_as_pillow_does_it(interpolation, side, size):
    tiles = tiles_of(side)
    steps = Preprocessing(size, MEAN, STD, interpolation)
    found = levels(Preprocess(steps)(tiles)).round().numpy()
    way = Image.Resampling[interpolation.upper()]
    for tile, one in zip(tiles.numpy(), found, strict=True):
        wanted = np.asarray(Image.fromarray(tile).resize((size, size), way)).astype(float)
        most, mean = (1, 0.001) if interpolation == "bicubic" else (2, 0.1)  # which has many ties
        assert abs(one - wanted).max() <= most
        assert abs(one - wanted).mean() < mean


def test_the_middle_is_cut_out_of_a_resized_tile():
    tiles = tiles_of(50)
    steps = Preprocessing(32, MEAN, STD, resized=50, offset=centred(50, 32))
    found = levels(Preprocess(steps, torch.float64)(tiles))
    torch.testing.assert_close(found, tiles[:, 9:41, 9:41].double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"interpolation": "lanczos"}, "set --interpolation to bilinear or bicubic"),
        ({"mean": (0.5,)}, "mean is 0.5, expected three finite numbers"),
        ({"std": (0.5, 0.0, 0.5)}, "expected numbers above 0"),
        ({"std": (0.5, float("nan"), 0.5)}, "expected three finite numbers"),
        ({"resized": 20}, "cannot be cropped to 32"),
    ],
)
def test_what_cannot_be_done_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**{"size": 32, "mean": MEAN, "std": STD, **wrong})


# --- user-defined encoders


TINY = "tests.inference.features.tiny.Tiny"


def test_weights_of_a_file_are_loaded(tmp_path):
    network = Tiny(seed=5)
    torch.save(
        {"state_dict": {**network.state_dict(), "head.weight": torch.zeros(2)}}, tmp_path / "w.pt"
    )
    encoder = make_encoder(Wish(TINY, tmp_path / "w.pt"))
    assert encoder.digest() == type(encoder)(encoder.network, encoder.preprocessing, "").digest()
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(encoder.network(images), network.eval()(images))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet18", {}, "expected timm:NAME"),
        ("no_such_package.Net", {}, "cannot be imported"),
        ("tests.inference.features.tiny.None_", {}, "cannot be imported"),
        ("pathlib.Path", {}, "returns a PosixPath, expected a torch.nn.Module"),
        (TINY, {"depth": 3}, "cannot be made with {'depth': 3}: TypeError"),
        ("tests.inference.features.tiny.Silent", {}, "no attribute mean: add --mean"),
    ],
)
def test_what_is_no_encoder_is_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_encoder(Wish(name, arguments=arguments))


def test_outputs_that_are_no_features_are_refused():
    with pytest.raises(ValueError, match=r"returns \[1, 12, 8, 8\] for 1 images, expected"):
        make_encoder(Wish("tests.inference.features.tiny.Map")).width()
    with pytest.raises(ValueError, match="does not take images of 4 x 4"):
        make_encoder(Wish(TINY, size=4)).width()
