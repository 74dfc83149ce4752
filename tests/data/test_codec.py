from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data.codec import CODECS, Coding, decode, filters_of

BYTE, WORD = np.dtype(np.uint8), np.dtype(np.uint16)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"codec": "png"}, "codec is 'png', expected one of 'raw', 'jpeg', 'zstd', 'lz4'"),
        ({"quality": 0}, "quality is 0, expected 1 to 100"),
        ({"quality": 101}, "quality is 101, expected 1 to 100"),
        ({"level": 0}, "level is 0, expected 1 to 22"),
        ({"level": 23}, "level is 23, expected 1 to 22"),
    ],
)
def test_wrong_settings_are_refused(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Coding(**settings)


def test_masks_bear_no_loss() -> None:
    assert [Coding(codec).of_masks.codec for codec in CODECS] == ["raw", "raw", "zstd", "lz4"]


def test_filters_are_the_registered_ones() -> None:
    assert [filters_of(codec, BYTE) for codec in CODECS] == [[], [32019], [32015, 3], [32004, 3]]
    assert filters_of("zstd", WORD) == [2, 32015, 3]


@pytest.mark.parametrize("codec", ["jpeg", "zstd", "lz4"])
def test_chunks_are_decoded_to_their_shape(codec: str) -> None:
    chunk = np.full((16, 24, 3), 77, np.uint8)
    coded = np.frombuffer(Coding(codec).encode(chunk), np.uint8)
    assert (decode(codec, coded, chunk.shape, BYTE) == chunk).all()
    with pytest.raises(ValueError, match=r"."):
        decode(codec, coded, (16, 25, 3), BYTE)
