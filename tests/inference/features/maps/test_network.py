from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import SlideError
from spatialdl.inference.features.maps.network import MapNetwork, RegionParts, grid_for
from spatialdl.training.optimization.precision import precision_of
from tests.inference.features.maps.networks import Convolved, encoder_of, mapped, region_of

CPU = torch.device("cpu")


def network_of(network: nn.Module, parts: RegionParts, precision: str = "float64") -> MapNetwork:
    return MapNetwork(
        encoder_of(network), CPU, precision_of(precision, CPU), parts, SingleProcess()
    )


@pytest.mark.parametrize(
    "parts", [RegionParts((1, 1)), RegionParts((3, 2)), RegionParts((2, 3), 2e-4)]
)
def test_a_region_in_parts_has_the_map_of_one_piece(tmp_path, parts):
    region = region_of(tmp_path / "a.tif", (148, 92))
    size, [piece] = network_of(Convolved(), parts).run(region)
    assert size == (37, 23)
    assert piece.start == (0, 0)
    torch.testing.assert_close(piece.values, mapped(Convolved(), region), rtol=0, atol=1e-10)


def test_mixed_precision_gives_float32(tmp_path):
    region = region_of(tmp_path / "a.tif", (64, 64))
    _, [piece] = network_of(Convolved(), RegionParts((1, 1)), "bf16-mixed").run(region)
    assert piece.values.dtype == torch.float32
    wanted = mapped(Convolved(), region).float()
    assert 0 < (piece.values - wanted).abs().max() < 0.2


def test_grids_are_as_square_as_they_go():
    assert [grid_for(n) for n in (1, 2, 3, 4, 6, 7, 12)] == [
        *((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (7, 1), (4, 3))
    ]


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
