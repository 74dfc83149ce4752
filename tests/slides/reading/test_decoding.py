from __future__ import annotations

import imagecodecs
import numpy as np
import pytest

from spatialdl.slides.reading import decoding
from spatialdl.slides.reading.decoding import decoder_of

TILE = np.add.outer(np.arange(64) * 3, np.arange(64))[..., None].astype(np.uint8) + np.array(
    [0, 40, 90], np.uint8
)


def test_all_colours_of_jpeg_2000_are_those_of_the_formula() -> None:
    """ITU-T T.871, section 7, rounded."""
    random = np.random.default_rng(0).integers(0, 256, (500, 400, 3), np.uint8)
    y, cb, cr = (random[..., k].astype(float) for k in range(3))
    right = np.stack(
        [
            y + 1.402 * (cr - 128),
            y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128),
            y + 1.772 * (cb - 128),
        ],
        -1,
    )
    stored = bytes(imagecodecs.jpeg2k_encode(random, codecformat="J2K", mct=False))
    decoder = decoder_of(decoding.APERIO_YCBCR, decoding.RGB, 3, None)
    assert decoder is not None
    assert np.abs(decoder.decode(stored) - np.clip(right, 0, 255)).max() <= 0.51


def test_what_has_no_decoder() -> None:
    for compression, photometric, samples in [
        (decoding.JPEG, decoding.RGB, 4),
        (decoding.JPEG, decoding.GREY, 3),
        (decoding.JPEG, 5, 4),
        (decoding.APERIO_RGB, decoding.GREY, 1),
        (8, decoding.RGB, 3),
    ]:
        assert decoder_of(compression, photometric, samples, None) is None


def test_a_decoder_says_whether_it_tells_of_damage() -> None:
    decoder = decoder_of(decoding.JPEG, decoding.YCBCR, 3, None)
    assert decoder is not None
    stored = bytes(imagecodecs.jpeg8_encode(TILE, level=90))
    assert (decoder.decode(stored) == imagecodecs.jpeg8_decode(stored)).all()
    half = stored[: len(stored) * 2 // 3] + bytes(len(stored) // 3)
    if decoder.silent:
        assert decoder.decode(half).shape == TILE.shape
    else:
        with pytest.raises(ValueError, match="end"):
            decoder.decode(half)
    with pytest.raises((ValueError, RuntimeError)):
        decoder.decode(bytes(100))
