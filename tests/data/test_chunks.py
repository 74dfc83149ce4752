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

from spatialdl.data import ShardWriter, coded_reading, jpeg, lossless, raw_reading
from spatialdl.data.chunk_cache import ChunkCache
from spatialdl.data.chunk_map import map_chunks
from spatialdl.data.chunks import Chunks
from spatialdl.data.codec import CODECS, JPEG, Codec, Coding, decode, filters_of
from spatialdl.data.coded_reading import read_coded
from spatialdl.data.jpeg import JpegStream, checked, encode
from spatialdl.data.raw_reading import MappedFile, PreadFile, file_system, open_raw
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
    assert (number, flags) == (JPEG, h5py.h5z.FLAG_OPTIONAL)
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


def test_what_is_not_raw_is_left_to_hdf5(h5: h5py.File) -> None:
    h5["whole"] = IMAGE
    h5.create_dataset("zip", data=IMAGE, chunks=(32, 48, 3), compression="gzip")
    h5.create_dataset("big", data=IMAGE.astype(">i2"), chunks=(32, 48, 3))
    h5.create_dataset("planes", data=IMAGE, chunks=(32, 48, 1))
    h5.create_dataset("pairs", data=np.stack([IMAGE, IMAGE]), chunks=(2, 32, 48, 3))
    h5.create_dataset("line", data=IMAGE.reshape(-1), chunks=(48,))
    for name in h5:
        assert map_chunks(h5[name], name == "pairs", 2**40) is None, name


def test_other_codecs_are_refused(h5: h5py.File) -> None:
    Chunks(h5, "raw", IMAGE.shape, (32, 48)).write(IMAGE)
    Chunks(h5, "zstd", IMAGE.shape, (32, 48), coding=Coding("zstd")).write(IMAGE)
    says = re.escape("it has uint8 in filters [32015, 3], expected codec 'lz4'")
    with pytest.raises(ValueError, match=says):
        map_chunks(h5["zstd"], False, 2**40, "lz4")
    assert map_chunks(h5["zstd"], False, 2**40) is None
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
    PreadFile(opened).read(shard[1], out, WHOLE)
    assert (out == IMAGE).all()
    monkeypatch.setattr(os, "preadv", preadv)
    with monkeypatch.context() as patch:
        patch.setattr(raw_reading.np, "empty", None)  # a whole chunk needs no buffer
        PreadFile(opened).read(shard[1], out[:32, :48].copy(), np.s_[32:64, 48:96])
    os.truncate(shard[0], 10_000)
    with pytest.raises(OSError, match=r"end of file at byte 10000, expected \d+ more bytes"):
        PreadFile(opened).read(shard[1], out, WHOLE)


def test_the_better_reader_of_the_file_system(shard, opened, monkeypatch) -> None:
    path = shard[0]
    for kind, reader in [
        ("ext4", MappedFile),
        *((kind, PreadFile) for kind in ("lustre", "nfs4", "gpfs", "unheard-of", None)),
    ]:
        monkeypatch.setattr(raw_reading, "file_system", lambda _, kind=kind: kind)
        assert isinstance(open_raw(opened, path, "auto"), reader)
        assert isinstance(open_raw(opened, path, "pread"), PreadFile)
        assert isinstance(open_raw(opened, path, "mmap"), MappedFile)

    def refuse(_fd: int) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(raw_reading, "file_system", lambda _: "ext4")
    monkeypatch.setattr(raw_reading, "MappedFile", refuse)
    assert isinstance(open_raw(opened, path, "auto"), PreadFile)
    with pytest.raises(OSError, match="no such device"):
        open_raw(opened, path, "mmap")


def test_file_systems_are_found_by_their_mounts(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:40 / /data rw shared:5 - nfs4 server:/data rw\n"
        "3 2 0:41 / /data/my\\040set rw - lustre mds@tcp:/x rw\n"
        "4 1 0:42 / /data/hidden rw - xfs /dev/sdb rw\n"
        "5 4 0:43 / /data/hidden rw - fuse.gcsfuse bucket rw\n"
    )
    (tmp_path / "link").symlink_to("/data")
    for path, kind in [
        ("/home/a", "ext4"),
        ("/data/a", "nfs4"),
        ("/database/a", "ext4"),
        ("/data/my set/a.h5", "lustre"),
        ("/data/hidden/a", "fuse.gcsfuse"),
        (tmp_path / "link/a", "nfs4"),
    ]:
        assert file_system(Path(path), table) == kind
    assert file_system(Path("/a"), tmp_path / "none") is None


@pytest.fixture(params=[MappedFile, PreadFile])
def read(h5: h5py.File, request: pytest.FixtureRequest) -> Reader:
    def of(name: str, codec: Codec, where: tuple, **more: object) -> np.ndarray:
        h5.flush()
        size = Path(h5.filename).stat().st_size
        chunks = map_chunks(h5[name], not isinstance(where[0], slice), size, codec)
        *_, rows, cols = where
        shape = (rows.stop - rows.start, cols.stop - cols.start, *chunks.cell[2:])
        out = np.full(shape, 7, chunks.dtype)
        fd = os.open(h5.filename, os.O_RDONLY)
        try:
            read_coded(request.param(fd), chunks, codec, out, where, **more)
        finally:
            os.close(fd)
        return out

    return of


def test_only_chunks_under_the_box_are_decoded_and_once(h5, read: Reader, monkeypatch) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48), coding=Coding("zstd")).write(IMAGE)
    decoded = []
    monkeypatch.setattr(
        coded_reading, "decode", lambda *given: decoded.append(given) or decode(*given)
    )
    cache = ChunkCache()
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


@pytest.mark.parametrize("codec", ["jpeg", "zstd"])
def test_chunks_that_are_missing_or_damaged_are_named(h5, read: Reader, codec: Codec) -> None:
    Chunks(h5, "empty", IMAGE.shape, (32, 48), coding=Coding(codec))
    chunks = Chunks(h5, "stack", IMAGE.shape, (32, 48), coding=Coding(codec), stacked=True)
    for _ in range(2):
        chunks.write(IMAGE, number=chunks.grow())
    h5["stack"].id.write_direct_chunk((1, 32, 48, 0), b"no picture")
    with pytest.raises(ValueError, match="chunk at row 32, column 0: it was not written"):
        read("empty", codec, np.s_[40:50, 0:10])
    with pytest.raises(ValueError, match="chunk at image 1, row 32, column 48: "):
        read("stack", codec, (1, *WHOLE))
    assert read("stack", codec, (0, *WHOLE)).shape == (70, 100, 3)


def chunk(number: int, size: int = 100) -> np.ndarray:
    return np.full(size, number, np.uint8)


def test_a_cache_drops_what_is_unused_longest() -> None:
    cache = ChunkCache(400)
    for number in (0, 1, 2, 3, 3, 3):
        cache.put(number, chunk(number))
    with pytest.raises(ValueError, match="read-only"):
        cache.get(0)[0] = 2
    cache.put(4, chunk(4))
    assert cache.get(1) is None
    assert [cache.get(number) is not None for number in (0, 2, 3, 4)] == [True] * 4
    cache.put(5, chunk(5, 200))
    assert cache.nbytes == 400
    assert [cache.get(number) is not None for number in (0, 2, 3, 4, 5)] == [False] * 2 + [True] * 3
    cache.put(6, chunk(1, 201))  # would fill it
    assert cache.get(6) is None
    assert cache.get(5) is not None
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_begins_with_an_empty_cache_even_where_it_was_locked() -> None:
    cache = ChunkCache(400)
    cache.put("a", chunk(1))
    with cache._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if cache.get("a") is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.get("a") is not None


BYTE, WORD = np.dtype(np.uint8), np.dtype(np.uint16)
LOSSLESS = ["zstd", "lz4"]
SMOOTH = (np.add.outer(np.arange(70), np.arange(100))[..., None] + np.arange(3)).astype(np.uint16)


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
