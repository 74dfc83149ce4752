"""Map pieces in a single process; for several ranks see tests/mpi/predicting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.predicting.pieces import MapPiece, PiecedMap, joined, to_file


@pytest.mark.parametrize("rows", [1, 4, 7, 100])
@pytest.mark.parametrize("offset", [(0, 0), (4, 3), (5, 0), (8, 9)])
def test_a_region_lies_at_its_place_in_the_map(offset, rows):
    size, (top, left) = (17, 20), offset
    values = torch.rand(2, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = [(0, 0, 5, 4), (0, 4, 5, 11), (5, 0, 9, 7), (5, 7, 9, 11)]  # 2 x 2, uneven
    pieces = [MapPiece((r0, c0), values[:, r0:r1, c0:c1]) for r0, c0, r1, c1 in parts]
    found = PiecedMap(SingleProcess(), size, pieces, (9, 11), offset)
    assert found.size == size
    for column in (0, 1):
        bands = list(found.bands(column, rows))
        assert [len(band) for band in bands[:-1]] == [rows] * (len(bands) - 1)
        expected = np.full(size, np.nan)
        expected[top : top + 9, left : left + 11] = values[column]
        assert np.array_equal(np.concatenate(bands), expected, equal_nan=True)


def test_pieces_of_a_box_are_joined():
    whole = torch.arange(2.0 * 7 * 5).view(2, 7, 5)
    parts = [((3, 1), whole[:, :4, :2]), ((3, 3), whole[:, :4, 2:]), ((7, 1), whole[:, 4:, :2])]
    parts.append(((7, 3), whole[:, 4:, 2:]))
    [one] = joined([MapPiece(start, values) for start, values in parts])
    assert one.start == (3, 1)
    assert torch.equal(one.values, whole)
    assert joined([]) == []
    alone = MapPiece((0, 0), whole)
    assert joined([alone]) == [alone]


def test_a_piece_may_lie_in_a_file_that_nobody_sees(tmp_path):
    values = torch.rand(3, 4, 5).transpose(1, 2)
    kept = to_file(tmp_path, MapPiece((7, 9), values))
    assert kept.start == (7, 9)
    assert torch.equal(kept.values, values)
    assert list(tmp_path.iterdir()) == []
