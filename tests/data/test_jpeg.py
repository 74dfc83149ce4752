from __future__ import annotations

import pickle

import imagecodecs
import numpy as np
import pytest
import simplejpeg

from spatialdl.data import jpeg
from spatialdl.data.jpeg import JpegStream, checked, decode, encode

RANDOM = np.random.default_rng(0)


def picture(rows: int, cols: int, channels: int = 3) -> np.ndarray:
    """Smooth colours with some noise."""
    slope = np.add.outer(np.arange(rows) * 2, np.arange(cols))[..., None] // 2 % 200
    return (slope + RANDOM.integers(0, 40, (rows, cols, channels))).astype(np.uint8)


@pytest.fixture(params=["simplejpeg", "imagecodecs"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "imagecodecs":
        monkeypatch.setattr(jpeg, "simplejpeg", None)
    return str(request.param)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("quality", [50, 90, 100])
def test_pixels_are_those_of_any_decoder(both: str, channels: int, quality: int) -> None:
    chunk = picture(67, 131, channels)
    stream = encode(chunk, quality)
    got = decode(stream, chunk.shape)
    assert got.dtype == np.uint8
    assert got.shape == chunk.shape
    right = simplejpeg.decode_jpeg(bytes(stream), "GRAY" if channels == 1 else "RGB")
    assert (got == right).all()
    if both == "simplejpeg":
        colours = ("GRAY", "Gray") if channels == 1 else ("RGB", "444")
        assert stream == simplejpeg.encode_jpeg(chunk, quality, *colours)
    assert np.abs(got.astype(int) - chunk).mean() < {50: 16, 90: 8, 100: 1}[quality]


def test_a_part_of_a_larger_array_is_encoded(both: str) -> None:
    image = picture(100, 90)
    part = image[3:60, 7:50]
    assert encode(part) == encode(part.copy())


def test_other_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="4 channels, but codec 'jpeg' supports 1 or 3"):
        encode(np.zeros((8, 8, 4), np.uint8))


@pytest.mark.parametrize("shape", [(16, 24, 1), (24, 16, 3), (8, 24, 3)])
def test_another_shape_is_refused(both: str, shape: tuple[int, int, int]) -> None:
    stream = bytes(encode(picture(16, 24)))
    rows, cols, channels = shape
    says = f"the JPEG is 16 x 24 with 3 channels, expected {rows} x {cols} with {channels}"
    for ask in (decode, checked):
        with pytest.raises(ValueError, match=says):
            ask(stream, shape)
    with pytest.raises(ValueError, match=says):
        checked(encode(picture(16, 24)), shape)


def test_colours_that_are_none_of_ours_are_refused() -> None:
    stream = imagecodecs.jpeg8_encode(picture(16, 24, 4))
    with pytest.raises(ValueError, match="colours CMYK"):
        decode(stream, (16, 24, 3))


@pytest.mark.parametrize("bad", [b"", b"abc", bytes(99), "cut", "half", "start"])
def test_what_is_no_whole_jpeg_is_refused(both: str, bad: bytes | str) -> None:
    stream = bytes(encode(picture(64, 64)))
    if isinstance(bad, str):
        bad = {"cut": stream[:-2], "half": stream[: len(stream) // 2], "start": stream[10:]}[bad]
    for ask in (decode, checked):
        with pytest.raises(ValueError, match=r"."):
            ask(bad, (64, 64, 3))


def test_the_check_finds_the_damage_that_decoding_finds() -> None:
    whole = [bytes(encode(picture(96, 80), quality)) for quality in (60, 95)]
    whole.append(simplejpeg.encode_jpeg(picture(96, 80), 80, colorsubsampling="420"))
    found = 0
    for number in range(300):
        stream = bytearray(whole[number % 3])
        at = int(RANDOM.integers(2, len(stream)))
        kind = number % 4
        if kind == 0:
            stream[at:] = bytes(len(stream) - at)
        elif kind == 1:
            del stream[at:]
        elif kind == 2:
            stream[at] ^= 1 << int(RANDOM.integers(8))
        else:
            stream[at : at + 8] = RANDOM.bytes(8)
        try:
            decode(bytes(stream), (96, 80, 3))
        except ValueError:
            found += 1
            with pytest.raises(ValueError, match=r"."):
                checked(bytes(stream), (96, 80, 3))
        else:
            assert checked(bytes(stream), (96, 80, 3)) == bytes(stream)
    assert 100 < found < 300


def test_a_stream_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = checked(bytes(encode(picture(16, 24))), (16, 24, 3))
    assert isinstance(stream, JpegStream)
    again = pickle.loads(pickle.dumps(stream))
    assert isinstance(again, JpegStream)
    assert (again, again.shape) == (stream, (16, 24, 3))
    monkeypatch.setattr(jpeg, "simplejpeg", "not asked any more")
    assert checked(again, (16, 24, 3)) is again
