"""Maps of regions: their strides, places, components, files and pictures."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import SlideError
from spatialdl.inference.features.maps import writing
from spatialdl.inference.features.maps.regions import Stride, stride_of
from spatialdl.inference.features.maps.running import MapNetwork, RegionParts
from spatialdl.inference.features.maps.writing import (
    FoundMap,
    components_of,
    save_map,
    save_picture,
)
from spatialdl.inference.features.results import MAPS, ResultFolders
from spatialdl.inference.predicting.pieces import MapPiece
from spatialdl.training.optimization.precision import precision_of
from tests.inference.features.maps.networks import Convolved, Pooling, encoder_of, region_of


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


def test_maps_that_do_not_grow_evenly_and_networks_for_one_size_are_refused():
    with pytest.raises(ValueError, match="returns 4 rows for an image of 64 x 64, 4 for one"):
        stride_of(encoder_of(Pooling()))
    finer = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Upsample(scale_factor=2))
    with pytest.raises(ValueError, match="has no regular stride"):
        stride_of(encoder_of(finer))

    class Fixed(nn.Module):
        def forward(self, images):
            return images + images.new_zeros(1, 3, 64, 64)

    with pytest.raises(ValueError, match="does not take images of 30304 x 30304"):
        stride_of(encoder_of(Fixed()))


def test_cells_have_a_place_in_the_slide(tmp_path):
    region = region_of(tmp_path / "a.tif", (120, 200))
    region.images.places, region.images.scale = [(50, 30)], 2.0
    found = region.attributes(Stride((4, 8), (4, 8)), (30, 25))
    assert found["affine"] == ((16.0, 0.0, 50.0), (0.0, 8.0, 30.0))
    assert (found["mpp"], found["region"], found["stride"]) == (1.0, (120, 200), (4, 8))
    assert (found["level0_x"], found["level0_y"]) == (50, 30)
    # of a convolution of 9 x 7 without padding the first cell is in the middle of 9 x 7 pixels
    assert region.attributes(Stride((1, 1), (1, 1)), (112, 194))["affine"] == (
        (2.0, 0.0, 56.0),
        (0.0, 2.0, 38.0),
    )


def pieces_of(values: torch.Tensor) -> list[MapPiece]:
    return [MapPiece((0, 0), values[:, :3]), MapPiece((3, 0), values[:, 3:])]


def test_components_are_those_of_all_cells():
    values = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(0))
    values[2] = 4 * values[0] + 100
    found = components_of(pieces_of(values), 6, SingleProcess())
    cells = values.double().flatten(1).T.numpy()
    centred = cells - cells.mean(0)
    _, singular, directions = np.linalg.svd(centred)
    np.testing.assert_allclose(found.parts, (singular**2 / (singular**2).sum())[:3], atol=1e-12)
    signs = np.sign((found.directions.numpy() * directions[:3]).sum(1, keepdims=True))
    np.testing.assert_allclose(found.directions, signs * directions[:3], atol=1e-9)
    assert (found.directions.gather(1, found.directions.abs().argmax(1, keepdim=True)) > 0).all()
    projected = centred @ found.directions.numpy().T
    for piece in pieces_of(values):
        first, rows = piece.start[0], piece.values.shape[1]
        wanted = projected.T.reshape(3, 7, 5)[:, first : first + rows]
        np.testing.assert_allclose(found.of(piece).values, wanted, atol=1e-5)


def test_a_region_is_drawn_beside_its_map(tmp_path):
    region = region_of(tmp_path / "a.tif", (60, 200))
    colours = np.zeros((15, 50, 3), np.uint8)
    colours[..., 0] = 200
    save_picture(tmp_path / "a.png", region, colours, np.array([0.7, 0.2]), 0.5)
    with Image.open(tmp_path / "a.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    red = (pixels == (200, 0, 0)).all(-1)
    rows, columns = (np.flatnonzero(red.any(axis)) for axis in (1, 0))
    assert np.ptp(columns) / np.ptp(rows) > 3
    assert columns[0] > pixels.shape[1] / 2 - 5  # on the right
    region.images.path.write_bytes(b"damaged")  # the map is drawn all the same
    save_picture(tmp_path / "b.png", region, colours, np.array([0.7]), 0.5)
    assert (tmp_path / "b.png").is_file()


def found_map(folder, values):
    region = region_of(folder / "a.tif", (4 * values.shape[1], 4 * values.shape[2]))
    (folder / "maps").mkdir(exist_ok=True)
    pieces = [MapPiece((0, 0), values[:, :, :3]), MapPiece((0, 3), values[:, :, 3:])]
    return FoundMap(region, tuple(values.shape[1:]), len(values), pieces)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_map_in_pieces_is_written_in_bands(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(writing, "_CHUNK_BYTES", 5 * 4 * 9)
    monkeypatch.setattr(writing, "_BAND_BYTES", 5 * 4 * 13 * 7)
    values = torch.randn(5, 23, 13, dtype=torch.float64)
    found = found_map(tmp_path, values).stored(dtype, SingleProcess())
    save_map(ResultFolders(tmp_path, MAPS), found, {"stride": (4, 4)}, None, SingleProcess())
    with h5py.File(tmp_path / "maps" / "a.h5") as file:
        features = file["features"]
        np.testing.assert_array_equal(features[:], values.to(getattr(torch, dtype)).numpy())
        assert features.chunks == (5, 3, 3) if dtype == "float32" else (5, 4, 4)
        assert features.attrs["stride"].tolist() == [4, 4]
    assert (tmp_path / "maps" / "a.png").is_file()


def test_features_that_are_not_finite_are_not_written(tmp_path):
    values = torch.zeros(2, 5, 5)
    values[0, 1, 4] = 1e6
    found = found_map(tmp_path, values)
    with pytest.raises(SlideError, match=r"1 of 25 cells .* in float16; use --dtype float32"):
        found.stored("float16", SingleProcess())
    values[1, 1, 4] = torch.nan
    with pytest.raises(SlideError, match=r"1 of 25 cells .* not finite; use --precision"):
        found.stored("float32", SingleProcess())


# --- encoders on regions


CPU = torch.device("cpu")


def network_of(network: nn.Module, parts: RegionParts, precision: str = "float64") -> MapNetwork:
    return MapNetwork(
        encoder_of(network), CPU, precision_of(precision, CPU), parts, SingleProcess()
    )


def test_regions_that_are_too_small_or_cannot_be_read_are_reported(tmp_path):
    region = region_of(tmp_path / "a.tif", (64, 64))
    with pytest.raises(SlideError, match=r"64x64 is smaller than --grid 65,1"):
        network_of(Convolved(), RegionParts((65, 1))).run(region)
    data = region.images.path.read_bytes()
    region.images.close()
    region.images.path.write_bytes(data[: len(data) // 4])
    with pytest.raises(SlideError, match=r"a\.tif"):
        network_of(Convolved(), RegionParts((1, 1))).run(region)


class Raising(Convolved):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, images):
        raise self.error


def test_too_little_memory_is_refused_with_what_helps(tmp_path):
    region = region_of(tmp_path / "a.tif", (64, 64))
    with pytest.raises(ValueError, match=r"64x64 does not fit into the device's memory: use more"):
        network_of(Raising(torch.OutOfMemoryError("no")), RegionParts((1, 1))).run(region)


class Sorting(nn.Module):
    def forward(self, images):
        return images.sort(2).values


def test_what_cannot_be_split_is_refused_by_name(tmp_path):
    region = region_of(tmp_path / "a.tif", (64, 64))
    with pytest.raises(ValueError, match=r"the encoder cannot be split: .*sort"):
        network_of(Sorting(), RegionParts((2, 2))).run(region)
    network_of(Sorting(), RegionParts((1, 1))).run(region)
