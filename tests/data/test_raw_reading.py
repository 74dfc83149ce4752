from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import raw_reading
from spatialdl.data.chunk_map import map_chunks
from spatialdl.data.chunks import Chunks
from spatialdl.data.raw_reading import MappedFile, PreadFile, file_system, open_raw

IMAGE = np.random.default_rng(0).integers(0, 256, (70, 100, 3), np.uint8)
BOXES = [(0, 70, 0, 100), (0, 1, 0, 1), (31, 65, 47, 97), (32, 64, 48, 96), (69, 70, 0, 48)]


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, object]:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        Chunks(file, "image", IMAGE.shape, (32, 48)).write(IMAGE)
    with h5py.File(path) as file:
        return path, map_chunks(file["image"], False, path.stat().st_size)


@pytest.fixture
def opened(shard):
    fd = os.open(shard[0], os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("kind", [MappedFile, PreadFile])
def test_boxes_are_slices_of_the_whole(kind, shard, opened) -> None:
    raw = kind(opened)
    for row0, row1, col0, col1 in BOXES:
        out = np.full((row1 - row0, col1 - col0, 3), 7, np.uint8)
        assert raw.read(shard[1], out, (slice(row0, row1), slice(col0, col1))) == []
        assert (out == IMAGE[row0:row1, col0:col1]).all()
        raw.forget()


@pytest.mark.parametrize("kind", [MappedFile, PreadFile])
@pytest.mark.parametrize("dtype", ["uint16", "float64"])
def test_types_of_more_than_a_byte(kind, dtype, tmp_path) -> None:
    image = (IMAGE * 3.25).astype(dtype)
    path = tmp_path / "b.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("odd", data=np.zeros(3, np.uint8))  # so that pixels begin anywhere
        Chunks(file, "image", image.shape, (32, 48), dtype).write(image)
    with h5py.File(path) as file:
        chunks = map_chunks(file["image"], False, path.stat().st_size)
    fd = os.open(path, os.O_RDONLY)
    raw = kind(fd)
    for row0, row1, col0, col1 in BOXES:
        out = np.full((row1 - row0, col1 - col0, 3), 7, dtype)
        assert raw.read(chunks, out, (slice(row0, row1), slice(col0, col1))) == []
        assert (out == image[row0:row1, col0:col1]).all()
    begin = int(chunks.offsets[1, 1])
    first = image[32, 48:].ravel()[: 96 // image.itemsize]
    assert (raw.stored(begin, 96).view(dtype) == first).all()
    os.close(fd)


def test_a_read_that_is_interrupted_goes_on(shard, opened, monkeypatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:1000]], at))
    out = np.empty(IMAGE.shape, np.uint8)
    PreadFile(opened).read(shard[1], out, (slice(0, 70), slice(0, 100)))
    assert (out == IMAGE).all()


def test_a_file_that_ends_is_an_error(shard, opened) -> None:
    os.truncate(shard[0], 10_000)
    out = np.empty(IMAGE.shape, np.uint8)
    with pytest.raises(OSError, match=r"end of file at byte 10000, expected \d+ more bytes"):
        PreadFile(opened).read(shard[1], out, (slice(0, 70), slice(0, 100)))


def test_whole_chunks_go_straight_to_where_they_are_wanted(shard, opened, monkeypatch) -> None:
    monkeypatch.setattr(raw_reading.np, "empty", None)  # no buffer
    out = np.zeros((32, 48, 3), np.uint8)
    PreadFile(opened).read(shard[1], out, (slice(32, 64), slice(48, 96)))
    assert (out == IMAGE[32:64, 48:96]).all()


def test_the_better_reader_of_the_file_system(shard, opened, monkeypatch) -> None:
    path = shard[0]
    monkeypatch.setattr(raw_reading, "file_system", lambda _: "ext4")
    assert isinstance(open_raw(opened, path, "auto"), MappedFile)
    assert isinstance(open_raw(opened, path, "pread"), PreadFile)
    for kind in ("lustre", "nfs4", "gpfs", "fuse.sshfs", "beegfs", "unheard-of", None):
        monkeypatch.setattr(raw_reading, "file_system", lambda _, kind=kind: kind)
        assert isinstance(open_raw(opened, path, "auto"), PreadFile)
    assert isinstance(open_raw(opened, path, "mmap"), MappedFile)


def test_where_files_cannot_be_mapped_auto_reads_them(shard, opened, monkeypatch) -> None:
    def refuse(_fd: int) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(raw_reading, "file_system", lambda _: "ext4")
    monkeypatch.setattr(raw_reading, "MappedFile", refuse)
    assert isinstance(open_raw(opened, shard[0], "auto"), PreadFile)
    with pytest.raises(OSError, match="no such device"):
        open_raw(opened, shard[0], "mmap")


def test_file_systems_are_found_by_their_mounts(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:40 / /data rw shared:5 - nfs4 server:/data rw\n"
        "3 2 0:41 / /data/my\\040set rw - lustre mds@tcp:/x rw\n"
        "4 1 0:42 / /data/hidden rw - xfs /dev/sdb rw\n"
        "5 4 0:43 / /data/hidden rw - fuse.gcsfuse bucket rw\n"
    )
    for path, kind in [
        ("/home/a", "ext4"),
        ("/data/a", "nfs4"),
        ("/database/a", "ext4"),
        ("/data/my set/a.h5", "lustre"),
        ("/data/hidden/a", "fuse.gcsfuse"),
    ]:
        assert file_system(Path(path), table) == kind
    assert file_system(Path("/a"), tmp_path / "none") is None
    (tmp_path / "link").symlink_to("/data")
    assert file_system(tmp_path / "link/a", table) == "nfs4"
