"""Codecs of chunks: JPEG, and those without loss."""

from __future__ import annotations

import pickle

import imagecodecs
import numpy as np
import pytest
import simplejpeg

from spatialdl.data import jpeg, lossless
from spatialdl.data.codec import CODECS, Coding, filters_of
from spatialdl.data.jpeg import JpegStream, checked, encode
from tests.data.conftest import RANDOM, picture

BYTE, WORD = np.dtype(np.uint8), np.dtype(np.uint16)
LOSSLESS = ["zstd", "lz4"]
SMOOTH = (np.add.outer(np.arange(70), np.arange(100))[..., None] + np.arange(3)).astype(np.uint16)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"codec": "png"}, "codec is 'png', expected one of 'raw', 'jpeg', 'zstd', 'lz4'"),
        *(({"quality": wrong}, f"quality is {wrong}, expected 1 to 100") for wrong in (0, 101)),
        *(({"level": wrong}, f"level is {wrong}, expected 1 to 22") for wrong in (0, 23)),
    ],
)
def test_wrong_settings_are_refused(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Coding(**settings)


def test_filters_are_the_registered_ones_and_masks_bear_no_loss() -> None:
    assert [Coding(codec).of_masks.codec for codec in CODECS] == ["raw", "raw", "zstd", "lz4"]
    assert [filters_of(codec, BYTE) for codec in CODECS] == [[], [32019], [32015, 3], [32004, 3]]
    assert filters_of("zstd", WORD) == [2, 32015, 3]


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
    got = jpeg.decode(stream, chunk.shape)
    assert (got.shape, got.dtype) == (chunk.shape, np.uint8)
    right = simplejpeg.decode_jpeg(bytes(stream), "GRAY" if channels == 1 else "RGB")
    assert (got == right).all()
    if both == "simplejpeg":
        colours = ("GRAY", "Gray") if channels == 1 else ("RGB", "444")
        assert stream == simplejpeg.encode_jpeg(chunk, quality, *colours)
    assert np.abs(got.astype(int) - chunk).mean() < {50: 16, 90: 8, 100: 1}[quality]
    part = chunk[3:60, 7:50]
    assert encode(part) == encode(part.copy())


@pytest.mark.parametrize("shape", [(16, 24, 1), (24, 16, 3), (8, 24, 3)])
def test_another_shape_is_refused(both: str, shape: tuple[int, int, int]) -> None:
    stream = encode(picture(16, 24))
    rows, cols, channels = shape
    says = f"the JPEG is 16 x 24 with 3 channels, expected {rows} x {cols} with {channels}"
    for ask, one in ((jpeg.decode, bytes(stream)), (checked, bytes(stream)), (checked, stream)):
        with pytest.raises(ValueError, match=says):
            ask(one, shape)


def test_other_channels_and_colours_are_refused() -> None:
    with pytest.raises(ValueError, match="4 channels, but codec 'jpeg' supports 1 or 3"):
        encode(np.zeros((8, 8, 4), np.uint8))
    with pytest.raises(ValueError, match="colours CMYK"):
        jpeg.decode(imagecodecs.jpeg8_encode(picture(16, 24, 4)), (16, 24, 3))


@pytest.mark.parametrize("bad", [b"", b"abc", bytes(99), slice(-2), slice(300), slice(10, None)])
def test_what_is_no_whole_jpeg_is_refused(both: str, bad: bytes | slice) -> None:
    stream = bytes(encode(picture(64, 64)))
    for ask in (jpeg.decode, checked):
        with pytest.raises(ValueError, match=r"."):
            ask(stream[bad] if isinstance(bad, slice) else bad, (64, 64, 3))


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
            jpeg.decode(bytes(stream), (96, 80, 3))
        except ValueError:
            found += 1
            with pytest.raises(ValueError, match=r"."):
                checked(bytes(stream), (96, 80, 3))
        else:
            assert checked(bytes(stream), (96, 80, 3)) == bytes(stream)
    assert 100 < found < 300


def test_a_stream_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = checked(bytes(encode(picture(16, 24))), (16, 24, 3))
    again = pickle.loads(pickle.dumps(stream))
    assert isinstance(again, JpegStream)
    assert (again, again.shape) == (stream, (16, 24, 3))
    monkeypatch.setattr(jpeg, "simplejpeg", "not asked any more")
    assert checked(again, (16, 24, 3)) is again


def stored(codec: str, chunk: np.ndarray = SMOOTH) -> np.ndarray:
    return np.frombuffer(lossless.encode(codec, chunk, 3), np.uint8)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_any_damage_is_told(codec: str) -> None:
    whole = stored(codec)
    assert len(whole) < SMOOTH.nbytes / 3
    assert len(lossless.encode("zstd", SMOOTH, 19)) <= len(lossless.encode("zstd", SMOOTH, 1))
    rng = np.random.default_rng(0)
    for at in {0, len(whole) - 1, *rng.integers(0, len(whole), 60).tolist()}:
        damaged = whole.copy()
        damaged[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(ValueError, match="checksum mismatch"):
            lossless.decode(codec, damaged, SMOOTH.shape, WORD)
    for length in (0, 3, 4, 20):
        with pytest.raises(ValueError, match=f"checksum mismatch in its {length} bytes"):
            lossless.decode(codec, whole[:length], SMOOTH.shape, WORD)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_chunks_of_another_size_and_nonsense_with_a_right_checksum_are_refused(codec: str) -> None:
    bomb = stored(codec, np.zeros((5000, 5000), np.uint8))
    with pytest.raises(ValueError, match="cannot decompress"):
        lossless.decode(codec, bomb, (8, 8, 1), BYTE)
    with pytest.raises(ValueError, match=r"it has 42000 bytes, expected 48000|cannot be"):
        lossless.decode(codec, stored(codec), (80, 100, 3), WORD)
    rng = np.random.default_rng(0)
    whole = stored(codec)[:-4]
    for _ in range(100):
        packed = whole.copy()
        packed[rng.integers(0, min(len(packed), 40), 3)] = rng.integers(0, 256, 3)
        made = np.concatenate([packed, np.frombuffer(lossless._checksum(packed), np.uint8)])
        try:
            found = lossless.decode(codec, made, SMOOTH.shape, WORD)
        except ValueError:
            continue
        assert found.shape == SMOOTH.shape
