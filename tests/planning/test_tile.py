"""The largest tile, and the bytes of all virtual tiles of its rank."""

from __future__ import annotations

import pytest
import torch

from spatialdl.parallel.layout import Layout
from spatialdl.planning.tile import LargestTile, largest_part, local


def test_the_rank_with_the_largest_tile_and_most_neighbours_counts():
    assert largest_part(Layout.even(1, (12, 12), (3, 3))) == 4
    assert largest_part(Layout.even(1, (7, 4), (2, 1))) == 1


@pytest.mark.parametrize(
    ("size", "grid", "stream", "rank", "part", "tile"),
    [
        ((12, 12), (1, 1), (3, 3), 0, 4, (4, 4)),
        ((13, 8), (2, 1), (2, 2), 1, 6, (4, 4)),
        ((7, 8), (2, 1), (1, 1), 1, 1, (4, 8)),
    ],
)
def test_a_virtual_tile_is_the_largest_of_the_rank_with_the_largest_part(
    size, grid, stream, rank, part, tile
):
    found = LargestTile((2, 3, *size), grid, stream)
    assert (found.rank, found.mesh.part) == (rank, part)
    image = found.image(torch.float32)
    assert local(image).shape == (2, 3, *tile)
    own = Layout.of_ranks(2, size, grid, stream).boxes[rank]
    rows, columns = (stop - start for start, stop in own.spatial)
    assert found.bytes(image) == 4 * 2 * 3 * rows * columns
    assert found.bytes(torch.empty(5, device="meta")) == 4 * 5


def test_without_virtual_tiles_a_tile_is_all_that_a_rank_has():
    found = LargestTile((1, 3, 7, 4), (2, 1))
    image = found.image(torch.float64)
    assert found.bytes(image) == local(image).nbytes == 8 * 3 * 4 * 4
    assert LargestTile((1, 3, 7, 4), (1, 1)).image(torch.float64).shape == (1, 3, 7, 4)
