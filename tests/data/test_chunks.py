"""Chunks: their codecs, how they are written to HDF5, where they lie, which are kept."""

from __future__ import annotations

import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path

import h5py
import imagecodecs
import numpy as np
import pytest
import simplejpeg

from spatialdl.data import ShardWriter, chunk_reading, jpeg
from spatialdl.data.chunk_map import map_chunks
from spatialdl.data.chunk_reading import ByteCache, read_coded, read_raw
from spatialdl.data.codec import (
    Codec,
    Coding,
    _checksum,
    decode,
    decode_lossless,
    encode_lossless,
)
from spatialdl.data.jpeg import JpegStream, checked, encode
from spatialdl.data.shard_file import Chunks
from tests.data.conftest import RANDOM, noise, picture

IMAGE = noise(70, 100)
WHOLE = np.s_[0:70, 0:100]
Reader = Callable[..., np.ndarray]


@pytest.mark.parametrize("channels", [1, 3])
def test_chunks_of_jpeg_are_whole_streams_that_hdf5_does_not_read(h5: h5py.File, channels) -> None:
    image = picture(70, 100, channels)
    Chunks(h5, "image", image.shape, (32, 48), coding=Coding("jpeg", 80)).write(image)
    dataset = h5["image"]
    assert (dataset.shape, dataset.dtype) == (image.shape, np.uint8)
    assert dataset.chunks == (32, 48, channels)
    for where in (..., np.s_[:1, :1], np.s_[69, 99, 0]):
        with pytest.raises(OSError, match=r"."):
            dataset[where]
    settings = dataset.id.get_create_plist()
    assert settings.get_nfilters() == 1
    number, flags, values, _ = settings.get_filter(0)
    assert (number, flags) == (32019, h5py.h5z.FLAG_OPTIONAL)
    assert values == (80, 48, 32, int(channels == 3))  # quality, columns, rows, colours
    padded = np.pad(image, ((0, 26), (0, 44), (0, 0)), mode="edge")
    for row in range(0, 70, 32):
        for col in range(0, 100, 48):
            unfiltered, stream = dataset.id.read_direct_chunk((row, col, 0))
            assert unfiltered == 0
            assert bytes(stream) == encode(padded[row : row + 32, col : col + 48], 80)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_others_read_what_is_compressed_without_loss(h5: h5py.File, codec: str) -> None:
    pytest.importorskip("hdf5plugin")
    image = (picture(70, 100) * 1.5).astype("uint16")
    Chunks(h5, "a", image.shape, (32, 48), "uint16", coding=Coding(codec)).write(image)
    h5.flush()
    with h5py.File(h5.filename) as again:
        assert (again["a"][:] == image).all()
        assert again["a"].fletcher32


def test_other_chunks_codecs_and_byte_orders_are_refused(h5: h5py.File) -> None:
    h5["whole"] = IMAGE
    h5.create_dataset("planes", data=IMAGE, chunks=(32, 48, 1))
    h5.create_dataset("pairs", data=np.stack([IMAGE, IMAGE]), chunks=(2, 32, 48, 3))
    h5.create_dataset("line", data=IMAGE.reshape(-1), chunks=(48,))
    for name in h5:
        with pytest.raises(ValueError, match="expected chunks of one image with all channels"):
            map_chunks(h5[name], name == "pairs", 2**40)
    h5.create_dataset("zip", data=IMAGE, chunks=(32, 48, 3), compression="gzip")
    Chunks(h5, "raw", IMAGE.shape, (32, 48)).write(IMAGE)
    Chunks(h5, "zstd", IMAGE.shape, (32, 48), coding=Coding("zstd")).write(IMAGE)
    says = re.escape("it has uint8 in filters [32015, 3], expected codec 'lz4'")
    with pytest.raises(ValueError, match=says):
        map_chunks(h5["zstd"], False, 2**40, "lz4")
    for name in ("zstd", "zip"):
        with pytest.raises(ValueError, match="expected codec 'raw'"):
            map_chunks(h5[name], False, 2**40)
    h5["zstd"].id.write_direct_chunk((32, 48, 0), IMAGE[:32, :48].copy(), filter_mask=1)
    with pytest.raises(ValueError, match=r"chunk at \(32, 48, 0\) skipped its filters"):
        map_chunks(h5["zstd"], False, 2**40, "zstd")
    with pytest.raises(ValueError, match=r"chunk at \(\d+, \d+, 0\) has 4608 bytes at \d+, expect"):
        map_chunks(h5["raw"], False, 20_000)  # beyond the file


@pytest.mark.parametrize(
    ("rows", "says"),
    [(0, "lies outside of"), (40, "lies outside of"), (2**60, "whose chunks do not fit")],
)
def test_an_image_of_another_size_than_its_chunks(tmp_path: Path, rows: int, says: str) -> None:
    """A few damaged bytes were an `IndexError`, or more memory than there is."""
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        Chunks(h5, "image", IMAGE.shape, (32, 48)).write(IMAGE)
    content = (tmp_path / "a.h5").read_bytes()
    before = struct.pack("<3Q", *IMAGE.shape)
    assert before in content
    damaged = content.replace(before, struct.pack("<3Q", rows, *IMAGE.shape[1:]))
    (tmp_path / "a.h5").write_bytes(damaged)
    with h5py.File(tmp_path / "a.h5") as h5, pytest.raises(ValueError, match=says):
        map_chunks(h5["image"], False, len(content))


def test_chunks_of_shards_begin_with_a_page(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set") as writer:
        for _ in range(3):
            writer.add(noise(600, 600), mask=noise(600, 600)[..., 0])
    shard = tmp_path / "set" / "shard-00000.h5"
    with h5py.File(shard) as file:
        for name in ("images", "masks"):
            assert (map_chunks(file[name], True, shard.stat().st_size).offsets % 4096 == 0).all()
    assert shard.stat().st_size < 3 * 4 * 512 * 512 * 4 + 50_000  # and there is little between


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, object]:
    path = tmp_path / "raw.h5"
    with h5py.File(path, "w") as file:
        Chunks(file, "image", IMAGE.shape, (32, 48)).write(IMAGE)
    with h5py.File(path) as file:
        return path, map_chunks(file["image"], False, path.stat().st_size)


@pytest.fixture
def opened(shard):
    fd = os.open(shard[0], os.O_RDONLY)
    yield fd
    os.close(fd)


def test_pread_goes_on_where_it_was_interrupted_and_ends_with_the_file(
    shard, opened, monkeypatch
) -> None:
    preadv, out = os.preadv, np.empty(IMAGE.shape, np.uint8)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:1000]], at))
    read_raw(opened, shard[1], out, WHOLE)
    assert (out == IMAGE).all()
    monkeypatch.setattr(os, "preadv", preadv)
    with monkeypatch.context() as patch:
        patch.setattr(chunk_reading.np, "empty", None)  # a whole chunk needs no buffer
        read_raw(opened, shard[1], out[:32, :48].copy(), np.s_[32:64, 48:96])
    os.truncate(shard[0], 10_000)
    with pytest.raises(OSError, match=r"end of file at byte 10000, expected \d+ more bytes"):
        read_raw(opened, shard[1], out, WHOLE)


@pytest.fixture
def read(h5: h5py.File) -> Reader:
    def of(name: str, codec: Codec, where: tuple, **more: object) -> np.ndarray:
        h5.flush()
        size = Path(h5.filename).stat().st_size
        chunks = map_chunks(h5[name], not isinstance(where[0], slice), size, codec)
        *_, rows, cols = where
        shape = (rows.stop - rows.start, cols.stop - cols.start, *chunks.cell[2:])
        out = np.full(shape, 7, chunks.dtype)
        fd = os.open(h5.filename, os.O_RDONLY)
        try:
            if codec == "raw":
                read_raw(fd, chunks, out, where)
            else:
                read_coded(fd, chunks, codec, out, where, **more)
        finally:
            os.close(fd)
        return out

    return of


def test_only_chunks_under_the_box_are_decoded_and_once(h5, read: Reader, monkeypatch) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48), coding=Coding("zstd")).write(IMAGE)
    decoded = []
    monkeypatch.setattr(
        chunk_reading, "decode", lambda *given: decoded.append(given) or decode(*given)
    )
    cache = ByteCache()
    for where, count, more in [
        (np.s_[0:32, 0:48], 1, {}),
        (np.s_[31:33, 5:6], 2, {}),
        (np.s_[31:65, 47:97], 9, {}),
        (np.s_[31:65, 47:97], 9, {"key": "a", "cache": cache}),
        (np.s_[31:65, 47:97], 0, {"key": "a", "cache": cache}),
        (np.s_[31:65, 47:97], 9, {"key": "another file", "cache": cache}),
    ]:
        decoded.clear()
        assert (read("image", "zstd", where, **more) == IMAGE[where]).all()
        assert len(decoded) == count
    assert len(cache) == 18


@pytest.mark.parametrize("codec", ["raw", "jpeg", "zstd"])
def test_chunks_that_are_missing_or_damaged_are_named(h5, read: Reader, codec: Codec) -> None:
    Chunks(h5, "empty", IMAGE.shape, (32, 48), coding=Coding(codec))
    chunks = Chunks(h5, "stack", IMAGE.shape, (32, 48), coding=Coding(codec), stacked=True)
    for _ in range(2):
        chunks.write(IMAGE, number=chunks.grow())
    with pytest.raises(ValueError, match="chunk at row 32, column 0: it was not written"):
        read("empty", codec, np.s_[40:50, 0:10])
    if codec == "raw":
        return
    h5["stack"].id.write_direct_chunk((1, 32, 48, 0), b"no picture")
    with pytest.raises(ValueError, match="chunk at image 1, row 32, column 48: "):
        read("stack", codec, (1, *WHOLE))
    assert read("stack", codec, (0, *WHOLE)).shape == (70, 100, 3)


def chunk(number: int, size: int = 100) -> np.ndarray:
    return np.full(size, number, np.uint8)


def test_a_cache_drops_what_is_unused_longest() -> None:
    cache = ByteCache(400)
    for number in (0, 1, 2, 3, 3, 3):
        cache.put(number, chunk(number))
    assert cache.get(0) is not None
    cache.put(4, chunk(4))
    assert [cache.get(number) is not None for number in range(5)] == [True, False, *[True] * 3]
    cache.put(5, chunk(5, 200))
    assert [cache.get(number) is not None for number in range(6)] == [False] * 3 + [True] * 3
    cache.put(6, chunk(6, 900))  # larger than the cache: it is alone there
    assert (len(cache), len(cache.get(6))) == (1, 900)
    cache.clear()
    assert len(cache) == 0


def test_a_fork_begins_with_an_empty_cache_even_where_it_was_locked() -> None:
    chunk_reading.CHUNKS.put("a", chunk(1))
    with chunk_reading.CHUNKS._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if chunk_reading.CHUNKS.get("a") is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert chunk_reading.CHUNKS.get("a") is not None


BYTE, WORD = np.dtype(np.uint8), np.dtype(np.uint16)
LOSSLESS = ["zstd", "lz4"]
SMOOTH = (np.add.outer(np.arange(70), np.arange(100))[..., None] + np.arange(3)).astype(np.uint16)


def test_pixels_are_those_of_any_decoder() -> None:
    for channels in (1, 3):
        chunk = picture(67, 131, channels)
        stream = encode(chunk, 90)
        got = jpeg.decode(stream, chunk.shape)
        assert (got.shape, got.dtype) == (chunk.shape, np.uint8)
        assert (got.squeeze() == imagecodecs.jpeg8_decode(stream)).all()
        assert np.abs(got.astype(int) - chunk).mean() < 8
        assert len(encode(chunk, 50)) < len(stream) < len(encode(chunk, 100))
        part = chunk[3:60, 7:50]
        assert encode(part) == encode(part.copy())


def test_what_is_no_whole_jpeg_of_a_shape_is_refused() -> None:
    stream, shape = encode(picture(16, 24)), (16, 24, 3)
    whole = bytes(stream)
    other = r"the JPEG is 16 x 24 with 3 channels, expected 8 x 24 with 1 channel$"
    damaged = (b"", b"abc", bytes(99), whole[:-2], whole[:300], whole[10:])
    for given, wanted, says in [
        *((one, (8, 24, 1), other) for one in (stream, whole)),
        (imagecodecs.jpeg8_encode(picture(16, 24, 4)), shape, "colours CMYK"),
        *((one, shape, r".") for one in damaged),
    ]:
        for ask in (jpeg.decode, checked):
            with pytest.raises(ValueError, match=says):
                ask(given, wanted)
    with pytest.raises(ValueError, match="4 channels, but codec 'jpeg' supports 1 or 3"):
        encode(np.zeros((8, 8, 4), np.uint8))


def test_the_check_finds_the_damage_that_decoding_finds() -> None:
    whole = [bytes(encode(picture(96, 80), quality)) for quality in (60, 95)]
    whole.append(simplejpeg.encode_jpeg(picture(96, 80), 80, colorsubsampling="420"))
    found = 0
    for number in range(160):
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
    assert 50 < found < 160


def test_a_stream_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = checked(bytes(encode(picture(16, 24))), (16, 24, 3))
    again = pickle.loads(pickle.dumps(stream))
    assert isinstance(again, JpegStream)
    assert (again, again.shape) == (stream, (16, 24, 3))
    monkeypatch.setattr(jpeg, "simplejpeg", "not asked any more")
    assert checked(again, (16, 24, 3)) is again


def stored(codec: str, chunk: np.ndarray = SMOOTH) -> np.ndarray:
    return np.frombuffer(encode_lossless(codec, chunk, 3), np.uint8)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_any_damage_is_told(codec: str) -> None:
    whole = stored(codec)
    assert len(whole) < SMOOTH.nbytes / 3
    assert len(encode_lossless("zstd", SMOOTH, 19)) <= len(encode_lossless("zstd", SMOOTH, 1))
    rng = np.random.default_rng(0)
    for at in {0, len(whole) - 1, *rng.integers(0, len(whole), 60).tolist()}:
        damaged = whole.copy()
        damaged[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(ValueError, match="checksum mismatch"):
            decode_lossless(codec, damaged, SMOOTH.shape, WORD)
    for length in (0, 3, 4, 20):
        with pytest.raises(ValueError, match=f"checksum mismatch in its {length} bytes"):
            decode_lossless(codec, whole[:length], SMOOTH.shape, WORD)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_chunks_of_another_size_and_nonsense_with_a_right_checksum_are_refused(codec: str) -> None:
    bomb = stored(codec, np.zeros((5000, 5000), np.uint8))
    with pytest.raises(ValueError, match="cannot decompress"):
        decode_lossless(codec, bomb, (8, 8, 1), BYTE)
    with pytest.raises(ValueError, match=r"it has 42000 bytes, expected 48000|cannot be"):
        decode_lossless(codec, stored(codec), (80, 100, 3), WORD)
    rng = np.random.default_rng(0)
    whole = stored(codec)[:-4]
    for _ in range(100):
        packed = whole.copy()
        packed[rng.integers(0, min(len(packed), 40), 3)] = rng.integers(0, 256, 3)
        made = np.concatenate([packed, np.frombuffer(_checksum(packed), np.uint8)])
        try:
            found = decode_lossless(codec, made, SMOOTH.shape, WORD)
        except ValueError:
            continue
        assert found.shape == SMOOTH.shape
