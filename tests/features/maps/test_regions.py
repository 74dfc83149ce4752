from __future__ import annotations

from spatialdl.features.maps.stride import Stride
from tests.features.maps.networks import region_of


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
