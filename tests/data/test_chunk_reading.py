"""Chunks are read at their offsets, raw or decoded, and decoded ones are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import coded_reading, raw_reading
from spatialdl.data.chunk_cache import ChunkCache
from spatialdl.data.chunk_map import map_chunks
from spatialdl.data.chunks import Chunks
from spatialdl.data.codec import Codec, Coding, decode
from spatialdl.data.coded_reading import read_coded
from spatialdl.data.raw_reading import MappedFile, PreadFile, file_system, open_raw
from tests.data.conftest import picture

IMAGE = picture(70, 100)
WHOLE = np.s_[0:70, 0:100]
Reader = Callable[..., np.ndarray]


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


@pytest.mark.parametrize("kind", [MappedFile, PreadFile])
def test_pixels_may_begin_anywhere(kind, h5) -> None:
    """Chunks of our shards begin with a page."""
    image = IMAGE * 3.25
    h5.create_dataset("odd", data=np.zeros(3, np.uint8))
    Chunks(h5, "image", image.shape, (32, 48), "float64").write(image)
    h5.flush()
    chunks = map_chunks(h5["image"], False, Path(h5.filename).stat().st_size)
    fd = os.open(h5.filename, os.O_RDONLY)
    raw = kind(fd)
    for where in (WHOLE, np.s_[31:65, 47:97], np.s_[32:64, 48:96]):
        out = np.full_like(image[where], 7)
        assert raw.read(chunks, out, where) == []
        assert (out == image[where]).all()
        raw.forget()
    assert (raw.stored(int(chunks.offsets[1, 1]), 96).view("f8") == image[32, 48:52].flat).all()
    os.close(fd)


def test_the_better_reader_of_the_file_system(shard, opened, monkeypatch) -> None:
    path = shard[0]
    for kind, reader in [
        ("ext4", MappedFile),
        *((kind, PreadFile) for kind in ("lustre", "nfs4", "gpfs", "fuse.sshfs", "beegfs")),
        *((kind, PreadFile) for kind in ("unheard-of", None)),
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
    assert (len(cache), cache.nbytes) == (4, 400)
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
