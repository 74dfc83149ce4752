from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from spatialdl.data import lossless
from spatialdl.data.pixels import DTYPES

CODECS = ["zstd", "lz4"]
IMAGE = (np.add.outer(np.arange(70), np.arange(100))[..., None] + np.arange(3)).astype(np.uint16)


def stored(codec: str, chunk: np.ndarray = IMAGE) -> np.ndarray:
    return np.frombuffer(lossless.encode(codec, chunk, 3), np.uint8)


@given(
    st.sampled_from(CODECS),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=2, max_dims=3, max_side=9))
    ),
)
def test_nothing_is_lost(codec: str, chunk: np.ndarray) -> None:
    again = lossless.decode(codec, stored(codec, chunk), chunk.shape, chunk.dtype)
    assert again.tobytes() == chunk.tobytes()  # NaN as it was
    assert (again.shape, again.dtype) == (chunk.shape, chunk.dtype)


@pytest.mark.parametrize("codec", CODECS)
def test_smooth_images_become_small(codec: str) -> None:
    assert len(stored(codec)) < IMAGE.nbytes / 3
    assert len(lossless.encode("zstd", IMAGE, 19)) <= len(lossless.encode("zstd", IMAGE, 1))


@pytest.mark.parametrize("codec", CODECS)
def test_any_flipped_bit_is_told(codec: str) -> None:
    whole = stored(codec)
    rng = np.random.default_rng(0)
    for at in {0, len(whole) - 1, *rng.integers(0, len(whole), 60).tolist()}:
        damaged = whole.copy()
        damaged[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(ValueError, match="checksum mismatch"):
            lossless.decode(codec, damaged, IMAGE.shape, IMAGE.dtype)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [0, 3, 4, 20])
def test_a_cut_stream_is_told(codec: str, length: int) -> None:
    with pytest.raises(ValueError, match=f"checksum mismatch in its {length} bytes"):
        lossless.decode(codec, stored(codec)[:length], IMAGE.shape, IMAGE.dtype)


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_of_another_size_is_refused(codec: str) -> None:
    bomb = stored(codec, np.zeros((5000, 5000), np.uint8))
    with pytest.raises(ValueError, match="cannot decompress"):
        lossless.decode(codec, bomb, (8, 8, 1), np.dtype(np.uint8))
    with pytest.raises(ValueError, match=r"it has 42000 bytes, expected 48000|cannot be"):
        lossless.decode(codec, stored(codec), (80, 100, 3), IMAGE.dtype)


@pytest.mark.parametrize("codec", CODECS)
def test_streams_of_nonsense_with_a_right_checksum_are_refused(codec: str) -> None:
    rng = np.random.default_rng(0)
    whole = stored(codec)[:-4]
    for _ in range(200):
        packed = whole.copy()
        packed[rng.integers(0, min(len(packed), 40), 3)] = rng.integers(0, 256, 3)
        made = np.concatenate([packed, np.frombuffer(lossless._checksum(packed), np.uint8)])
        try:
            found = lossless.decode(codec, made, IMAGE.shape, IMAGE.dtype)
        except ValueError:
            continue
        assert found.shape == IMAGE.shape
