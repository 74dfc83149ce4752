from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data.encoded import EncodedImage, Streams, grid_of


def test_streams_are_told_from_pixels() -> None:
    assert isinstance(Streams((8, 8, 3), (8, 8), [b""]), EncodedImage)
    assert not isinstance(np.zeros((8, 8, 3), np.uint8), EncodedImage)


def test_streams_lie_row_by_row() -> None:
    image = Streams((20, 33, 3), (16, 16), [b"0", b"1", b"2", b"3", b"4", b"5"])
    assert grid_of(image) == (2, 3)
    assert [image.encoded(1, col) for col in range(3)] == [b"3", b"4", b"5"]


def test_what_makes_no_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="has 3 streams, expected 2 x 2"):
        grid_of(Streams((20, 20, 3), (16, 16), [b""] * 3))
    for shape, chunk in [((8, 8), (8, 8)), ((8, 0, 3), (8, 8)), ((8, 8, 3), (0, 8))]:
        with pytest.raises(ValueError, match="has shape"):
            grid_of(Streams(shape, chunk, [b""]))  # type: ignore[arg-type]
